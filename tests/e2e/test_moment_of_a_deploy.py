"""Calls at the moment of a deployment: each is run by a version that takes it, none is refused by another's code."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from stoker.runtime.client.client import Client
from stoker.runtime.client.errors import StokerError
from stoker.runtime.local import LocalStack
from tests.e2e.callers import calling

pytestmark = pytest.mark.xdist_group("versions")

APP = """
import os, time
import stoker

app = stoker.App("moment")

# On the worker only.
while {go!r} and '/code/' in __file__ and not os.path.exists({go!r}):
    time.sleep(0.02)
{top}

@app.function(idle_timeout=60, concurrency=4)
def price({parameters}):
    return [{value!r}, {result}]
"""
OLD = {"parameters": "x, y=1", "value": "old", "result": "x + y"}
NEW = {"parameters": "x, y=1, z=1", "value": "new", "result": "x + y + z"}
BROKEN = "if '/code/' in __file__:\n    import not_installed_here"


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStack]:
    with LocalStack(tmp_path_factory.mktemp("moment") / "data") as stack:
        yield stack


def deploy(stack: LocalStack, folder: Path, version: dict[str, str], go: Path | None = None, top: str = "") -> None:
    path = folder / "moment_app.py"
    path.write_text(APP.format(**version, go=str(go or ""), top=top))
    stack.deploy(path)


def test_a_call_is_run_by_a_version_that_takes_it(stack: LocalStack, tmp_path: Path) -> None:
    go = tmp_path / "go"
    with stack.client() as client:
        deploy(stack, tmp_path, OLD)
        assert client.invoke("price", {"x": 1}) == ["old", 2]
        with calling(client, "price", {"x": 1}) as results:
            deploy(stack, tmp_path, NEW, go)
            waiting = [client.spawn("price", {"x": 1, "z": number}) for number in range(5)]
            seen = len(results)
            until(lambda: len(results) >= seen + 20, "the old version serves on")
            assert results[-1] == ["old", 2]
            assert not any(job.status()["finished_at"] for job in waiting)
            go.touch()
            assert [job.get(60) for job in waiting] == [["new", 2 + number] for number in range(5)]
            assert [job.status()["attempt"] for job in waiting] == [1] * 5
            until(lambda: results[-1] == ["new", 3], "the new version serves")
            deploy(stack, tmp_path, OLD)
            until(lambda: results[-1] == ["old", 2], "the old version serves again")


def test_calls_are_checked_against_the_version_that_serves(stack: LocalStack, tmp_path: Path) -> None:
    """The newest fails to start, which costs only those who call it as only it can be called."""
    with stack.client() as client:
        deploy(stack, tmp_path, OLD | {"parameters": "x: int, y: int = 1"})
        assert client.invoke("price", {"x": 1}) == ["old", 2]
        deploy(stack, tmp_path, NEW | {"parameters": "x: int, z: int", "result": "x + z"}, top=BROKEN)
        early = client.spawn("price", {"x": 1, "z": 1})
        until(lambda: client.request("GET", "/v1/functions/price")["rollout"], "the failure is known")
        until(lambda: answered(client) == ["old", 2], "old calls are taken")
        with pytest.raises(StokerError, match="z") as refused:
            client.invoke("price", {"x": 1, "z": 1})
        assert refused.value.status == 422
        record = client.wait(early.id, 60)
        assert record["error"]["code"] == "version_failed" and "not_installed_here" in record["error"]["message"]


def answered(client: Client) -> Any:
    """What the gateway knows of rollouts may be a second old."""
    try:
        return client.invoke("price", {"x": 1})
    except StokerError:
        return None


def until(look: Callable[[], Any], what: str, timeout_s: float = 60) -> None:
    deadline = time.monotonic() + timeout_s
    while not look():
        assert time.monotonic() < deadline, f"never: {what}"
        time.sleep(0.02)
