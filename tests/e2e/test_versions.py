"""Going back to an older version while callers call: nothing that was accepted is lost, and what runs ends on its own
version."""

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from stoker.runtime.cli import app
from stoker.runtime.client.errors import StokerError
from stoker.runtime.commands import rollout
from stoker.runtime.commands.exits import run
from stoker.runtime.local import LocalStack
from tests.e2e.callers import calling

pytestmark = pytest.mark.xdist_group("versions")

APP = """
import os, time
import stoker

app = stoker.App("shop")
{top}

@app.function(idle_timeout=60, max_replicas=2, concurrency=4, min_replicas={awake})
def price(seconds):
    time.sleep(seconds)
    return {value!r}
"""
BROKEN = "if '/code/' in __file__:\n    print('tries to start')\n    import not_installed_here"
CALLERS = 6


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStack]:
    with LocalStack(tmp_path_factory.mktemp("versions") / "data") as stack:
        yield stack


def write(folder: Path, value: str, top: str = "", awake: int = 0) -> Path:
    path = folder / "shop_app.py"
    path.write_text(APP.format(value=value, top=top, awake=awake))
    return path


def stoker(stack: LocalStack, *arguments: str) -> Any:
    result = CliRunner().invoke(app, [*arguments, "--url", stack.url, "--json"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_a_rollback_under_traffic_loses_nothing(stack: LocalStack, tmp_path: Path) -> None:
    with stack.client() as client:
        stack.deploy(write(tmp_path, "one"))
        assert client.invoke("price", 0) == "one"
        stack.deploy(write(tmp_path, "two"))
        until(lambda: client.invoke("price", 0) == "two", "the second version serves")
        with calling(client, "price", 0.02, CALLERS) as results:
            running = client.spawn("price", 3)
            until(lambda: running.status()["state"] == "running", "the long job runs")
            time.sleep(0.5)
            back = stoker(stack, "rollback", "shop")
            until(lambda: results[-20:] == ["one"] * 20, "the first version serves")
            waited = [client.spawn("price", 0) for _ in range(20)]
            assert {job.get(timeout=60) for job in waited} == {"one"}
        assert set(results) == {"one", "two"}
        assert running.get(timeout=60) == "two"
        record = running.status()
        assert (record["state"], record["attempt"]) == ("succeeded", 1)
        rows = stoker(stack, "versions", "price")
        assert [(row["version"] == back["version"], row["state"]) for row in rows] == [
            (False, "proven"),
            (True, "serving"),
        ]
        assert client.request("GET", "/v1/functions/price")["queued"] == 0


def deploy(stack: LocalStack, path: Path) -> int:
    return run(lambda: app(["deploy", str(path), "--wait", "--url", stack.url], standalone_mode=False))


def test_deploy_waits_until_the_version_serves_or_fails(stack: LocalStack, tmp_path: Path, capsys: Any) -> None:
    with stack.client() as client:
        assert deploy(stack, write(tmp_path, "three", awake=1)) == 0
        version = client.request("GET", "/v1/functions/price")["version"]
        assert f"version {version} serves" in capsys.readouterr().out
        assert client.invoke("price", 0) == "three"
        assert deploy(stack, write(tmp_path, "four", BROKEN, awake=1)) == 1
        said = capsys.readouterr().err
        assert "not_installed_here" in said and "stoker logs price" in " ".join(said.split())
        assert client.invoke("price", 0) == "three"
        newest, serving, *_ = stoker(stack, "versions", "shop")
        assert (newest["state"], newest["current"], serving["state"], serving["version"]) == (
            *("failed", True),
            *("serving", version),
        )
        lines = client.request("GET", "/v1/functions/price/logs")["data"]
        assert "tries to start" in [line["text"] for line in lines]
        assert any(line["text"].startswith("failed: ") and "not_installed_here" in line["text"] for line in lines)
        assert stoker(stack, "rollback", "shop", "--wait")["version"] == version
        assert client.invoke("price", 0) == "three"


SLEEPER = """
import os
import stoker

app = stoker.App("asleep")

@app.cls(idle_timeout=1)
class Sleeper:
    @stoker.load
    def load(self):
        assert os.path.exists({flag!r}), "no flag"

    @stoker.method
    def sleeper(self, n):
        return n
"""


def test_deploy_tries_whether_what_sleeps_starts(stack: LocalStack, tmp_path: Path, capsys: Any) -> None:
    """Also again, once what was wrong outside of the code is mended."""
    path, flag = tmp_path / "sleeper_app.py", tmp_path / "flag"
    path.write_text(SLEEPER.format(flag=str(flag)))
    assert deploy(stack, path) == 1
    assert "AssertionError: no flag" in capsys.readouterr().err
    with stack.client() as client:
        texts = [line["text"] for line in client.request("GET", "/v1/functions/sleeper/logs")["data"]]
        assert any("sleeper_app.py" in text and "in load" in text for text in texts), texts
        flag.touch()
        assert deploy(stack, path) == 0
        version = client.request("GET", "/v1/functions/sleeper")["version"]
        assert f"asleep: version {version} serves" in capsys.readouterr().out
        until(lambda: client.request("GET", "/v1/functions/sleeper")["replicas"] == {}, "it sleeps again")


def test_what_is_named_wrongly(stack: LocalStack, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["versions", "nothing"], ["rollback", "nothing"], ["rollback", "shop", "zz"]):
        assert run(lambda given=arguments: app([*given, "--url", stack.url], standalone_mode=False)) == 1
        assert arguments[-1] in capsys.readouterr().err
    with stack.client() as client, pytest.raises(StokerError, match="no version 'zz'"):
        client.request("POST", "/v1/apps/shop/rollback", json={"version": "zz"})


def until(look: Callable[[], Any], what: str, timeout_s: float = 60) -> None:
    deadline = time.monotonic() + timeout_s
    while not look():
        assert time.monotonic() < deadline, f"never: {what}"
        time.sleep(0.05)


NOWHERE = """
import stoker

app = stoker.App("nowhere")

@app.function(gpu="any")
def paint(x):
    return x
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="here is a host that can run it")
def test_deploy_says_what_it_waits_for_and_not_for_ever(
    stack: LocalStack, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rollout, "MOST_S", 4.0)
    path = tmp_path / "nowhere_app.py"
    path.write_text(NOWHERE)
    assert deploy(stack, path) == 1
    first, *_, last = capsys.readouterr().err.strip().splitlines()
    assert first.startswith("paint: ")
    assert "doesn't serve after" in last and "paint: no host has a GPU (any)" in last
    with stack.client() as client:
        assert client.request("GET", "/v1/functions/paint")["wait_reason"].startswith("no host has a GPU")
        client.delete("paint")
