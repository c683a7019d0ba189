"""The function that `benchmarks.invoke` calls."""

import stoker

app = stoker.App("invoke")


@app.function(concurrency=64, min_replicas=1)
def noop(request: dict[str, int]) -> dict[str, int]:
    return {"y": request["x"]}
