"""Seconds in which a host can't report, or a gateway can't tell: nothing that is awake is started anew for that, no job
runs twice, and who follows a job hears its end."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from stoker.queue import cluster
from stoker.runtime.local import LocalStack
from tests.children import descendants

SILENCE_S = cluster.HOST_TTL_MS / 1000 + 2
APP = """
import os, time
import stoker

app = stoker.App("quiet")

@app.function(idle_timeout=60)
def whoami(n):
    return [n, os.getpid()]

@app.function(retries=9)
def slowly(n):
    for i in range(n):
        time.sleep(0.2)
        yield i
"""


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStack]:
    folder = tmp_path_factory.mktemp("silences")
    (folder / "quiet_app.py").write_text(APP)
    with LocalStack(folder / "data") as stack:
        stack.deploy(folder / "quiet_app.py")
        yield stack


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def controller_log(stack: LocalStack) -> str:
    return (Path(stack.data_dir) / "logs" / "controller.log").read_text()


@pytest.mark.parametrize("marker", ["valkey-server", "worker --host-id"], ids=["server", "agent"])
def test_a_replica_outlives_its_hosts_silence(stack: LocalStack, marker: str) -> None:
    with stack.client() as client:
        pid = client.invoke("whoami", 1)[1]
        with stopped(descendants(stack.pid, marker)[0].pid):
            time.sleep(SILENCE_S)
        jobs = [client.spawn("whoami", n) for n in range(20)]
        assert [job.get(timeout=60) for job in jobs] == [[n, pid] for n in range(20)]
    assert "drop whoami" not in controller_log(stack)


@pytest.mark.parametrize(
    ("marker", "number"),
    [("valkey-server", signal.SIGKILL), ("cli gateway", signal.SIGTERM), ("cli gateway", signal.SIGKILL)],
    ids=["server killed", "gateway stopped", "gateway killed"],
)
@pytest.mark.parametrize("begun", [False, True])
def test_who_follows_a_job_hears_its_end(stack: LocalStack, marker: str, number: signal.Signals, begun: bool) -> None:
    with stack.client() as client:
        job = client.spawn("slowly", 15)
        events = job.events()
        seen = [next(event for event in events if not event.name)] if begun else []
        os.kill(descendants(stack.pid, marker)[0].pid, number)
        seen += events
    assert [event.data for event in seen if not event.name] == list(range(15))
    assert seen[-1].name == "end" and seen[-1].data["result"] == list(range(15))
