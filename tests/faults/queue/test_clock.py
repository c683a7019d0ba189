"""The server's clock jumps: a preloaded library shifts what a real server reads as the time of day.

Forwards, leases and deadlines end early, which costs attempts but loses nothing. Backwards, a dead worker's job waits
longer by the jump, because its lease was written in the old time; live workers' beats bring theirs back at once.
"""

import shutil
import struct
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from stoker.queue.broker import Broker
from stoker.queue.embedded import EmbeddedValkey
from stoker.queue.records import Completion, Emission, JobState, Settled
from tests.faults.queue.conftest import MakeJob
from tests.queue.queue_oracle import Oracle

HOUR_S = 3600
SOURCE = Path(__file__).with_name("clock.c")


class Clock:
    def __init__(self, path: Path) -> None:
        self.path = path
        path.write_bytes(struct.pack("l", 0))

    def jump(self, server: redis.Redis, seconds: int) -> None:
        """To `seconds` from the true time; returns when the server sees it, which may take some milliseconds."""
        with self.path.open("r+b") as file:
            file.write(struct.pack("l", seconds))
        deadline = time.monotonic() + 10
        while abs(server.time()[0] - time.time() - seconds) > 5:
            assert time.monotonic() < deadline, "the server's clock did not jump"
            time.sleep(0.005)


@pytest.fixture
def clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Takes effect in the server that is started after it."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler for the library that shifts the server's clock")
    library = tmp_path / "clock.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, SOURCE], check=True)
    clock = Clock(tmp_path / "offset")
    monkeypatch.setenv("STOKER_CLOCK", str(clock.path))
    monkeypatch.setenv("LD_PRELOAD", str(library))
    return clock


@pytest.fixture
def server(clock: Clock, tmp_path: Path, binary: Path | None) -> Iterator[EmbeddedValkey]:
    subject = EmbeddedValkey(tmp_path / "data", tmp_path / "s", binary=binary)
    subject.start()
    yield subject
    subject.stop()


@pytest.mark.parametrize("offset", [HOUR_S, -HOUR_S])
async def test_every_job_still_ends_once(
    clock: Clock, raw: redis.Redis, broker: Broker, oracle: Oracle, job: MakeJob, offset: int
) -> None:
    jobs = [job(retention_ms=4 * HOUR_S * 1000) for _ in range(6)]
    for new in jobs:
        await broker.enqueue(new)
    held, abandoned = await broker.claim("f", "w", 2)
    await broker.emit("f", [Emission(held.job_id, held.fence, 1, b"1")])
    clock.jump(raw, offset)
    assert await broker.beat("f", "w", {held.job_id: held.fence}) == {}
    assert await broker.tick("f") == (offset > 0)
    oracle.check("f")
    late = await broker.claim("f", "w2", 10)
    assert min(claim.fence for claim in late) > max(held.fence, abandoned.fence)
    assert (abandoned.job_id in {claim.job_id for claim in late}) == (offset > 0)
    emissions = [Emission(claim.job_id, claim.fence, 2, b"2") for claim in (held, *late)]
    assert await broker.emit("f", emissions) == []
    completions = [Completion(claim.job_id, claim.fence, b"r", b"u") for claim in (held, *late)]
    assert await broker.done("f", completions) == [Settled.DONE] * len(completions)
    clock.jump(raw, offset + 2 * HOUR_S)
    await broker.tick("f")
    for claim in await broker.claim("f", "w3", 10):
        await broker.done("f", [Completion(claim.job_id, claim.fence, b"r", b"u")])
    shot = oracle.check("f")
    assert {row["state"] for row in shot.jobs.values()} == {JobState.SUCCEEDED}
    assert [chunk.data for chunk in await broker.chunks(held.job_id)] == [b"1", b"2"]


async def test_deadlines_and_delays_follow_the_servers_clock(
    clock: Clock, raw: redis.Redis, broker: Broker, job: MakeJob
) -> None:
    expires, delayed = job(start_within_ms=HOUR_S * 1000), job(delay_ms=HOUR_S * 1000)
    for new in (expires, delayed):
        await broker.enqueue(new)
    clock.jump(raw, HOUR_S + 1)
    assert await broker.tick("f") == 2
    record = await broker.job(expires.id)
    assert record is not None and record.state is JobState.EXPIRED
    assert [claim.job_id for claim in await broker.claim("f", "w", 2)] == [delayed.id]
