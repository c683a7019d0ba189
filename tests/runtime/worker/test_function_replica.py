"""What function processes say, which nobody trusts; and who gets the jobs of one that comes to its end."""

import asyncio
import math
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stoker.queue.broker import Broker
from stoker.queue.records import Job, NewJob, new_job_id, pack, unpack
from stoker.runtime.spec import Batch, FunctionSpec
from stoker.runtime.tenancy.vault import Vault
from stoker.runtime.worker import function_replica
from stoker.runtime.worker.function_replica import FunctionReplica, phases_of, together
from stoker.runtime.worker.host import Host
from stoker.runtime.worker.replica import Start
from stoker.runtime.worker.zygote_link import ZygoteLink
from tests.runtime.worker.test_replica import host, until_ready

__all__ = ["host"]

CODE = """
import os, socket, stat, time
from stoker.runtime.current_job import current_job
from stoker.runtime.wire import Channel


def own_socket():
    # A copy of the channel's.
    for fd in map(int, os.listdir("/proc/self/fd")):
        try:
            if stat.S_ISSOCK(os.fstat(fd).st_mode):
                return os.dup(fd)
        except OSError:
            pass


def several(kind):
    if kind == "nonsense":
        Channel.from_fd(own_socket()).send({"t": "results", "items": 5})
    if kind == "half a result":
        Channel.from_fd(own_socket()).send({"t": "results", "items": [[current_job.get()]]})
    if kind == "hangs up and stays":
        os._exit = lambda code: time.sleep(60)
        socket.socket(fileno=own_socket()).shutdown(socket.SHUT_RDWR)
    if kind == "too much memory":
        several.kept = b"x" * (200 << 20)
    time.sleep(60)


def batched(kinds):
    return kinds
"""
SPEC = FunctionSpec(name="f", kind="python", version="1", code="0" * 64, entry="ending:several", concurrency=4)


def test_phases_of_a_start_have_a_size() -> None:
    honest = [{"name": "import code", "start_ns": 1, "end_ns": 2}, {"name": "load step", "start_ns": 2, "end_ns": 3}]
    assert phases_of({"t": "ready", "phases": honest}) == honest
    hostile = [{"name": "x" * 10_000, "start_ns": 1, "end_ns": 2, "more": "x" * 1_000_000}] * 10_000
    assert len(pack(phases_of({"t": "ready", "phases": hostile}))) < 4_096


@pytest.mark.parametrize("phases", [7, {"name": 1}, [{}], [{"name": 1, "start_ns": 1, "end_ns": 2}], [[]]])
def test_what_is_no_phase_is_refused(phases: Any) -> None:
    with pytest.raises((TypeError, KeyError)):
        phases_of({"t": "ready", "phases": phases})


@pytest.fixture
async def worker(host: Host, tmp_path: Path) -> AsyncIterator[Host]:
    """With what functions need: their code, a zygote, and a vault."""
    folder = host.settings.data_dir / "bundles" / SPEC.code
    folder.mkdir(parents=True)
    (folder / "ending.py").write_text(CODE)
    host.zygote = ZygoteLink(tmp_path / "zygote.log")
    host.vault = Vault(host.broker._redis, "")
    # Nobody renews leases here.
    host.broker = Broker(host.broker._redis, lease_ms=60_000)
    yield host
    await host.zygote.close()


class SlowKernel:
    """Takes its time to end what is killed: until it is told to go on."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        patch.setattr(function_replica, "send_signal", lambda *_, **__: None)

    def end(self, replica: FunctionReplica) -> None:
        assert replica._process is not None
        os.killpg(replica._process.pid, signal.SIGKILL)


async def started(worker: Host, spec: FunctionSpec = SPEC) -> FunctionReplica:
    replica = FunctionReplica("r", spec, worker, Start())
    replica.start()
    await until_ready(replica)
    return replica


@pytest.mark.parametrize(
    ("deployed", "leaving", "said"),
    [
        ("1", False, "went to sleep: there was no work for it"),
        ("2", False, "stopped: version 2 is deployed now"),
        ("", False, "stopped: its function was deleted"),
        ("1", True, "stopped with its host"),
    ],
)
async def test_a_log_ends_with_why_it_ends(worker: Host, deployed: str, leaving: bool, said: str) -> None:
    """And not with the signal that ended a process which had nothing to do."""
    if deployed:
        await worker.cluster.put_function("f", replace(SPEC, version=deployed).to_dict())
    replica = await started(worker)
    worker.leaving = leaving
    await replica.stop(0.0)
    lines, _ = await worker.logs.last("f", 100, 0, lambda _: True)
    texts = [line.text for line in lines]
    assert texts[-1] == said and not any("signal" in text for text in texts)


async def until_it_takes_no_more(replica: FunctionReplica) -> None:
    async with asyncio.timeout(45):
        while not replica._stopping.is_set():
            await asyncio.sleep(0.005)


async def enqueue(worker: Host, kind: str) -> str:
    job_id = new_job_id("f")
    job = NewJob(id=job_id, function="f", tenant="a", payload=pack({"input": kind}), max_attempts=1)
    await worker.broker.enqueue(job)
    return job_id


async def job_of(worker: Host, job_id: str) -> Job:
    job = await worker.broker.job(job_id)
    assert job is not None
    return job


async def claimed_by_another(worker: Host) -> tuple[str, int]:
    """The job and its attempt."""
    async with asyncio.timeout(45):
        while not (claims := await worker.broker.claim("f", "other", 1)):
            await asyncio.sleep(0.01)
    return claims[0].job_id, claims[0].attempt


SLOW = """
import time, stoker

time.sleep(0.5)

class Slow:
    @stoker.load
    def get_ready(self):
        time.sleep(0.5)

    def run(self, x):
        return x
"""


async def test_a_start_says_what_it_does(worker: Host) -> None:
    (worker.settings.data_dir / "bundles" / SPEC.code / "slow.py").write_text(SLOW)
    replica = FunctionReplica("r", replace(SPEC, entry="slow:Slow.run"), worker, Start())
    said = [replica.report()["step"]]
    replica.start()
    async with asyncio.timeout(45):
        while replica.state != "ready":
            if (step := replica.report()["step"]) != said[-1]:
                said.append(step)
            await asyncio.sleep(0.001)
    await replica.stop(0.0)
    steps = ["fetching its code", "starting its process", "importing its code", "running its load step"]
    assert said == steps


@pytest.mark.parametrize(
    ("kind", "code", "message"),
    [
        ("nonsense", "process_died", "sent what can't be read"),
        ("half a result", "process_died", "sent what can't be read"),
        ("too much memory", "memory_exceeded", "more than its memory_mb=150"),
        ("hangs up and stays", "process_died", "its process ended with signal 9"),
    ],
)
async def test_no_job_goes_to_a_process_that_is_coming_to_its_end(
    worker: Host, monkeypatch: pytest.MonkeyPatch, kind: str, code: str, message: str
) -> None:
    """Whatever ends it: what comes meanwhile is another's, at its first attempt."""
    kernel = SlowKernel(monkeypatch)
    replica = await started(worker, replace(SPEC, gpu="any", memory_mb=150))
    ended = await enqueue(worker, kind)
    await until_it_takes_no_more(replica)
    later = await enqueue(worker, "later")
    assert await claimed_by_another(worker) == (later, 1)
    assert list(replica.held) == [ended] and replica.state == "ready"
    kernel.end(replica)
    await asyncio.wait_for(replica.stop(math.inf), 45)
    job = await job_of(worker, ended)
    assert job.state.terminal and job.attempt == 1 and job.error is not None
    error = unpack(job.error)
    assert error["code"] == code and message in error["message"]
    assert replica.state == "failed"


async def test_what_waits_for_a_batch_goes_back_unharmed_when_the_process_ends(worker: Host) -> None:
    spec = replace(SPEC, entry="ending:batched", concurrency=1, batch=Batch(max_size=2, max_wait_ms=600_000))
    replica = await started(worker, spec)
    waits = await enqueue(worker, "waits")
    async with asyncio.timeout(45):
        while waits not in replica.held:
            await asyncio.sleep(0.005)
    assert replica._process is not None
    os.kill(replica._process.pid, signal.SIGKILL)
    assert await claimed_by_another(worker) == (waits, 1)
    await asyncio.wait_for(replica.stop(math.inf), 45)
    assert replica.state == "failed" and replica.held == {}


async def test_what_is_handed_over_at_the_last_moment_is_not_sent(
    worker: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its claim was on its way when the process came to its end."""
    kernel = SlowKernel(monkeypatch)
    replica = await started(worker)
    await enqueue(worker, "nonsense")
    await until_it_takes_no_more(replica)
    late = await enqueue(worker, "late")
    replica._send_batch(await replica.take(await worker.broker.claim("f", worker.worker, 1)))
    assert await claimed_by_another(worker) == (late, 1)
    kernel.end(replica)
    await asyncio.wait_for(replica.stop(math.inf), 45)


def test_results_that_came_at_once_are_one_frame_and_keep_their_place() -> None:
    first, second, third = ({"t": "results", "items": [[name, True, 1]]} for name in "abc")
    chunk, nonsense = {"t": "chunk", "id": "c", "value": 1}, 7
    frames: list[Any] = [first, second, chunk, third, nonsense]
    both = {"t": "results", "items": [["a", True, 1], ["b", True, 1]]}
    assert list(together(frames)) == [both, chunk, third, nonsense]
