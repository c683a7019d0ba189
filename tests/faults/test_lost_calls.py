"""A host that stood still finds that its jobs were given away, and gets them back while their first calls still run."""

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from stoker.runtime.local import LocalStack

pytestmark = pytest.mark.xdist_group("lost calls")

LEASE_S = 2
APP = """
import asyncio, time
import stoker

app = stoker.App("lost")


def count(path):
    with open(path, "a") as file:
        file.write("x")
    with open(path) as file:
        return len(file.read())


@app.function(concurrency=4, retries=2, idle_timeout=60)
async def hears(path):
    mine = count(path)
    try:
        await asyncio.sleep(20 if mine == 1 else 0)
    except asyncio.CancelledError:
        await asyncio.sleep(1)
        return "the first call's"
    return mine


@app.function(concurrency=4, retries=2, idle_timeout=60)
def streams(path):
    mine = count(path)
    for number in range(200 if mine == 1 else 3):
        time.sleep(0.1 if mine == 1 else 0)
        yield [mine, number]
"""


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStack]:
    folder = tmp_path_factory.mktemp("lost")
    with LocalStack(folder / "data", env={"STOKER_LEASE_MS": str(LEASE_S * 1000)}) as stack:
        (folder / "lost_app.py").write_text(APP)
        stack.deploy(folder / "lost_app.py")
        yield stack


@pytest.mark.parametrize(("function", "wanted"), [("hears", 2), ("streams", [[2, 0], [2, 1], [2, 2]])])
def test_the_result_is_the_second_call_s(stack: LocalStack, tmp_path: Path, function: str, wanted: object) -> None:
    counted = tmp_path / "counted"
    (agent,) = [each for each in psutil.Process(stack.pid).children() if "worker" in each.cmdline()]
    with stack.client() as client:
        job = client.spawn(function, str(counted))
        deadline = time.monotonic() + 60
        while not counted.exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        agent.send_signal(signal.SIGSTOP)
        time.sleep(1.5 * LEASE_S)
        agent.send_signal(signal.SIGCONT)
        assert job.get(timeout=60) == wanted
        assert client.job(job.id)["attempt"] > 1
    assert counted.read_text() == "xx"
