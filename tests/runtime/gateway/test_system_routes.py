import asyncio
import re
from typing import Any

import httpx

from stoker.queue.broker import Broker
from stoker.queue.cluster import Cluster
from stoker.runtime.client.media import MSGPACK

from .peers import Deploy, Task, worker

JOB = "/v1/jobs/{id}"


async def test_health_and_readiness(http: httpx.AsyncClient) -> None:
    assert (await http.get("/healthz")).json() == {"status": "ok"}
    assert (await http.get("/readyz")).json() == {"status": "ready"}


async def metric(http: httpx.AsyncClient, name: str, **labels: str) -> float:
    """The sample with these labels; 0 when there is none."""
    lines = (await http.get("/metrics")).text.splitlines()
    wanted = {f'{key}="{value}"' for key, value in labels.items()}
    for line in lines:
        found = re.fullmatch(r"(\w+)(?:\{(.*)\})? (\S+)", line)
        if found and found[1] == name and wanted <= set((found[2] or "").split(",")):
            return float(found[3])
    return 0


def replica(name: str) -> dict[str, Any]:
    fetched = {"retries": 3, "sources": {"cache": {"bytes": 700}, "peer": {"bytes": 20}}}
    records = [{"name": "fetch weights", "start_ns": 0, "end_ns": 2_000_000_000, **fetched}]
    return {
        "function": name,
        "version": "",
        "state": "ready",
        "loaded_bytes": 1,
        "total_bytes": 1,
        "inflight": 0,
        "error": None,
        "cold_start": {"records": records},
    }


async def test_metrics_follow_requests_jobs_and_replicas(
    http: httpx.AsyncClient, broker: Broker, cluster: Cluster, deploy: Deploy
) -> None:
    async def counted(task: Task) -> None:
        await task.emit({"value": 1})
        await task.done({"value": 1}, prompt_tokens=5, completion_tokens=3, cached_tokens=2, cold_start_ms=1500)

    name = await deploy()
    await cluster.report_host("m1", {"id": "m1", "device": "cpu", "replicas": {f"r-{name}": replica(name)}})
    async with worker(broker, name, counted):
        await http.post(f"/v1/functions/{name}", json=1)
    await http.post(f"/v1/functions/{name}/jobs", json=1)
    route = "/v1/functions/{name}"
    assert await metric(http, "stoker_http_requests_total", method="POST", route=route, status="200") >= 1
    assert await metric(http, "stoker_http_request_seconds_count", route=route) >= 1
    assert await metric(http, "stoker_jobs_ended_total", function=name, state="succeeded") == 1
    assert await metric(http, "stoker_queue_seconds_count", function=name) == 1
    for kind, count in (("prompt", 5), ("completion", 3), ("cached", 2)):
        assert await metric(http, "stoker_tokens_total", function=name, kind=kind) == count
    assert await metric(http, "stoker_cold_start_wait_seconds_sum", function=name) == 1.5
    assert await metric(http, "stoker_unmatched", route="nothing") == 0


async def test_gauges_and_cold_starts_come_from_the_cluster(
    http: httpx.AsyncClient, cluster: Cluster, deploy: Deploy
) -> None:
    name = await deploy()
    await http.post(f"/v1/functions/{name}/jobs", json=1)
    await cluster.report_host("m2", {"id": "m2", "device": "cpu", "replicas": {f"r-{name}": replica(name)}})
    for _ in range(200):
        if await metric(http, "stoker_queue_depth", function=name):
            break
        await asyncio.sleep(0.02)
    assert await metric(http, "stoker_queue_depth", function=name) == 1
    assert await metric(http, "stoker_replicas", function=name, state="ready") == 1
    assert await metric(http, "stoker_replicas", function=name, state="loading") == 0
    assert await metric(http, "stoker_cold_starts_total", function=name) == 1
    assert await metric(http, "stoker_cold_start_phase_seconds_sum", function=name, phase="fetch weights") == 2
    assert await metric(http, "stoker_weights_bytes_total", function=name, source="cache") == 700
    assert await metric(http, "stoker_weights_bytes_total", function=name, source="peer") == 20
    assert await metric(http, "stoker_weights_retries_total", function=name) == 3
    await cluster.forget_host("m2")


async def test_the_description_covers_every_route(http: httpx.AsyncClient) -> None:
    document = (await http.get("/openapi.json")).json()
    assert document["openapi"].startswith("3.1")
    operations = [operation for path in document["paths"].values() for operation in path.values()]
    assert len({operation["operationId"] for operation in operations}) == len(operations)
    assert set(document["paths"]["/v1/functions/{name}"]) == {"get", "put", "post", "delete"}
    chat = document["components"]["schemas"]["ChatRequest"]
    assert {"messages", "model", "max_completion_tokens", "stop"} <= set(chat["properties"])
    assert set(chat["required"]) == {"model", "messages"}
    for reference in set(re.findall(r"#/components/schemas/(\w+)", str(document))):
        assert reference in document["components"]["schemas"]


async def test_what_may_be_msgpack_is_described(http: httpx.AsyncClient) -> None:
    paths = (await http.get("/openapi.json")).json()["paths"]
    asked, answered = set(), set()
    for path, methods in paths.items():
        for method, operation in methods.items():
            if MSGPACK in operation.get("requestBody", {}).get("content", {}):
                asked.add(f"{method} {path}")
            if MSGPACK in operation["responses"].get("200", {}).get("content", {}):
                answered.add(f"{method} {path}")
    calls = {"post /v1/functions/{name}", "post /v1/functions/{name}/jobs", "put /v1/functions/{name}/jobs/{id}"}
    assert asked == calls
    records = {f"{method} {path}" for method in ("get", "delete") for path in (JOB, f"/v1/functions/{{name}}{JOB[3:]}")}
    assert answered == calls | records | {f"post {JOB}/replay", f"get {JOB}/result"}


async def test_every_described_route_exists(http: httpx.AsyncClient) -> None:
    document = (await http.get("/openapi.json")).json()
    for path, methods in document["paths"].items():
        for method in methods:
            response = await http.request(method, re.sub(r"{\w+}", "nothing-there", path), content=b"{}")
            assert response.status_code != 405 and response.status_code < 500
            assert response.status_code != 404 or response.json()["error"]["code"] != "not_found", path


async def test_the_page_for_people_escapes_what_it_shows(http: httpx.AsyncClient, cluster: Cluster) -> None:
    await cluster.report_host("h<script>", {"id": "h<script>", "device": "cpu", "replicas": {}})
    text = ""
    while "h&lt;script&gt;" not in text:
        response = await http.get("/")
        text = response.text
    assert response.headers["content-type"].startswith("text/html")
    assert "h<script>" not in text
    await cluster.forget_host("h<script>")
