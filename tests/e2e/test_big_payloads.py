"""An input above 64 KiB goes through the object store, from the client to the function's process."""

from pathlib import Path

from stoker.runtime.local import LocalStack

APP = """
import stoker

app = stoker.App("texts")


@app.function(idle_timeout=30)
def measure(text: str) -> list:
    return [len(text), text[-3:]]
"""


def test_a_big_input_reaches_the_function(stack: LocalStack, app_folder: Path) -> None:
    app = app_folder / "texts.py"
    app.write_text(APP)
    stack.deploy(app)
    with stack.client() as client:
        assert client.invoke("measure", "x" * 1_000_000 + "end") == [1_000_003, "end"]
        assert client.invoke("measure", "small") == [5, "all"]
        client.delete("measure")
