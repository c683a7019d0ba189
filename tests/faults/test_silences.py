"""Seconds in which a host can't report: nothing that is awake is started anew for that, and no job runs twice."""

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
import os
import stoker

app = stoker.App("quiet")

@app.function(idle_timeout=60)
def whoami(n):
    return [n, os.getpid()]
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
