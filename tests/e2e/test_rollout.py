"""A version that can't start never takes a working one down, also when that one is asleep by then."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from stoker.runtime import cli
from stoker.runtime.local import LocalStack

from .test_request_path import wait_asleep

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
BROKEN = "if 'bundles' in __file__:\n    import not_installed_here"


def deploy(stack: LocalStack, folder: Path, value: str, top: str = "") -> None:
    path = folder / "rolled_app.py"
    path.write_text(APP.format(top=top, value=value))
    stack.deploy(path)


def test_the_last_working_version_is_woken_while_a_new_one_can_not_start(stack: LocalStack, app_folder: Path) -> None:
    deploy(stack, app_folder, "v1")
    with stack.client() as client:
        assert client.invoke("rolled") == "v1"
        working = client.request("GET", "/v1/functions/rolled")
        assert working["rollout"] is None
        wait_asleep(stack, "rolled")
        deploy(stack, app_folder, "v2", BROKEN)
        for _ in range(2):
            assert client.invoke("rolled") == "v1"
            wait_asleep(stack, "rolled")
        broken = client.request("GET", "/v1/functions/rolled")
        rollout = broken["rollout"]
        assert (rollout["version"], rollout["serving"]) == (broken["version"], working["version"])
        assert "not_installed_here" in rollout["error"]
        shown = CliRunner().invoke(cli.app, ["functions", "--url", stack.url]).output
        assert f"version {rollout['version']} does not start" in shown and f"{rollout['serving']} serves" in shown
        assert f"rolled: version {broken['version']} does not start" in controller_log(stack)
        job = client.submit("rolled", None)
        deploy(stack, app_folder, "v3")
        assert client.invoke("rolled") in ("v1", "v3"), "whichever was awake first"
        wait_asleep(stack, "rolled")
        assert client.invoke("rolled") == "v3"
        assert client.job(job["id"])["state"] == "succeeded"
        assert client.request("GET", "/v1/functions/rolled")["rollout"] is None


def controller_log(stack: LocalStack) -> str:
    return (stack.data_dir / "logs" / "controller.log").read_text()
