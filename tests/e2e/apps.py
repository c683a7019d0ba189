"""Apps that the end-to-end and fault tests deploy."""

import shutil
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"

CHAT = """
import stoker

app = stoker.App("chat")
chat = app.llm("chat", weights={weights!r}, idle_timeout={idle}, max_model_len=2048)
"""

TOOLS = """
import os
import time

import stoker

app = stoker.App("tools")


@app.function(idle_timeout=30)
def add(x: int, y: int = 1) -> int:
    return x + y


@app.function(idle_timeout=30)
def boom(value):
    raise ValueError(f"can't work with {value}")


@app.function(idle_timeout=30)
def count(n: int):
    for i in range(n):
        yield {"i": i}
        time.sleep(0.01)


@app.function(idle_timeout=30)
def slow(seconds: float) -> float:
    time.sleep(seconds)
    return seconds


@app.function(idle_timeout=30)
def environment(_) -> dict:
    return {"pid": os.getpid(), "redis": os.environ.get("STOKER_REDIS", "")}


@app.function(idle_timeout=30)
def die(_) -> None:
    os._exit(7)


@app.function(batch=stoker.Batch(max_size=8, max_wait_ms=200), idle_timeout=30)
def sizes(values: list) -> list:
    return [len(values)] * len(values)
"""


def write_chat(folder: Path, weights: str, idle: float = 60.0, name: str = "chat_app.py") -> Path:
    path = folder / name
    path.write_text(CHAT.format(weights=weights, idle=idle))
    return path


def write_tools(folder: Path) -> Path:
    path = folder / "tools.py"
    path.write_text(TOOLS)
    return path


def write_apps(folder: Path, weights: str) -> list[Path]:
    sentiment = folder / "sentiment.py"
    shutil.copy(EXAMPLES / "sentiment.py", sentiment)
    return [write_chat(folder, weights), write_tools(folder), sentiment]
