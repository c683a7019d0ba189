"""A version that can't start never takes a working one down, also when that one is asleep by then."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from stoker.runtime import cli
from stoker.runtime.local import LocalStack

pytestmark = [pytest.mark.real_model, pytest.mark.xdist_group("e2e")]

APP = """
import stoker

app = stoker.App("rolled")
{top}

@app.function(idle_timeout=0.5)
def rolled(x):
    return {value!r}
"""
# On the worker only: the machine that deploys has what the code needs.
BROKEN = "if '/code/' in __file__:\n    import not_installed_here"


def deploy(stack: LocalStack, folder: Path, value: str, top: str = "") -> None:
    path = folder / "rolled_app.py"
    path.write_text(APP.format(top=top, value=value))
    stack.deploy(path)


def test_the_last_working_version_is_woken_while_a_new_one_can_not_start(stack: LocalStack, app_folder: Path) -> None:
    with stack.client() as client:
        deploy(stack, app_folder, "v1")
        assert client.invoke("rolled") == "v1"
        working = client.request("GET", "/v1/functions/rolled")
        assert working["rollout"] is None
        deploy_asleep(stack, app_folder, "v2", BROKEN)
        # Often enough for callers of a function that has nothing else to be refused.
        for _ in range(4):
            assert client.invoke("rolled") == "v1"
            until(lambda: is_asleep(stack), "rolled sleeps")
        assert controller_log(stack).count("start a replica of rolled (new)") >= 2
        rollout = until(lambda: client.request("GET", "/v1/functions/rolled")["rollout"], "the rollout is told")
        assert rollout["serving"] == working["version"] != rollout["version"]
        assert "not_installed_here" in rollout["error"]
        said = f"rolled: version {rollout['version']} does not start: {rollout['error']}; version {working['version']}"
        assert said in controller_log(stack)
        assert said in CliRunner().invoke(cli.app, ["functions", "--url", stack.url]).output
        deploy_asleep(stack, app_folder, "v3")
        assert client.invoke("rolled") == "v3"
        until(lambda: client.request("GET", "/v1/functions/rolled")["rollout"] is None, "the rollout is over")


def deploy_asleep(stack: LocalStack, folder: Path, value: str, top: str = "") -> None:
    until(lambda: is_asleep(stack), "rolled sleeps")
    deploy(stack, folder, value, top)


def is_asleep(stack: LocalStack) -> bool:
    """As the controller wants it: what a gateway tells of replicas is up to a second old."""
    wanted = [line for line in controller_log(stack).splitlines() if " wanted: " in line]
    return "rolled-" not in wanted[-1]


def until(look: Callable[[], Any], what: str, timeout_s: float = 90) -> Any:
    deadline = time.monotonic() + timeout_s
    while not (found := look()):
        assert time.monotonic() < deadline, f"never: {what}"
        time.sleep(0.05)
    return found


def controller_log(stack: LocalStack) -> str:
    return (stack.data_dir / "logs" / "controller.log").read_text()
