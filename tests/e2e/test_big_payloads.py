"""Inputs and results above 64 KiB go through the object store, between the client and the function's process."""

from pathlib import Path

from stoker.runtime.local import LocalStack

APP = """
import stoker

app = stoker.App("texts")


@app.function(idle_timeout=30)
def measure(text: str) -> list:
    return [len(text), text[-3:]]


@app.function(idle_timeout=30)
def repeat(times: int) -> str:
    return "x" * times
"""


def test_big_inputs_and_results_arrive(stack: LocalStack, app_folder: Path) -> None:
    app = app_folder / "texts.py"
    app.write_text(APP)
    stack.deploy(app)
    with stack.client() as client:
        assert client.invoke("measure", "x" * 1_000_000 + "end") == [1_000_003, "end"]
        assert client.invoke("measure", "small") == [5, "all"]
        assert client.invoke("repeat", 1_000_000) == "x" * 1_000_000
        client.delete("measure")
        client.delete("repeat")
