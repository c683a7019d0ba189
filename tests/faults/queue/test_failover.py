"""The primary dies and its replica is promoted. Replication is asynchronous, so what the replica had not received yet
is gone although it was acknowledged; nothing else is, and a fence that was lost is never given out again.
"""

import asyncio
import contextlib
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis
from redis.exceptions import ReadOnlyError

from stoker.queue.broker import Broker
from stoker.queue.client import connect
from stoker.queue.embedded import valkey_binary
from stoker.queue.records import Completion, JobState, Settled
from stoker.queue.retry import AWAY, insist
from tests.children import end
from tests.faults.queue.conftest import MakeJob
from tests.faults.queue.proxy import Proxy
from tests.queue.queue_oracle import Oracle

PATIENCE_S = 20


class Node:
    """A server on a Unix socket and on a port, which replication needs."""

    def __init__(self, binary: Path, folder: Path, *options: str) -> None:
        folder.mkdir()
        self.path = folder / "s"
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        command = [binary, "--port", str(self.port), "--bind", "127.0.0.1", "--dir", folder, "--save", ""]
        command += ["--appendonly", "yes", "--unixsocket", self.path, "--repl-diskless-sync-delay", "0", *options]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        self.raw = redis.Redis(unix_socket_path=str(self.path))
        try:
            self.until(lambda: self.raw.ping())
        except BaseException:
            self.end()
            raise

    def until(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline and self.process.poll() is None:
            with contextlib.suppress(redis.exceptions.ConnectionError):
                if condition():
                    return
            time.sleep(0.02)
        raise AssertionError("the server is not as it should be")

    def end(self) -> None:
        self.raw.close()
        end(self.process, 0)


@pytest.fixture
def nodes(tmp_path: Path, binary: Path | None) -> Iterator[tuple[Node, Node]]:
    program = binary or valkey_binary()
    primary = Node(program, tmp_path / "1")
    try:
        replica = Node(program, tmp_path / "2", "--replicaof", "127.0.0.1", str(primary.port))
        try:
            replica.until(lambda: replica.raw.info("replication")["master_link_status"] == "up")
            yield primary, replica
        finally:
            replica.end()
    finally:
        primary.end()


async def test_a_replica_takes_over(nodes: tuple[Node, Node], job: MakeJob, tmp_path: Path) -> None:
    primary, replica = nodes
    oracle = Oracle(replica.raw, "gw")
    async with Proxy(tmp_path / "p", primary.path).running() as proxy:
        client = connect(proxy.url)
        broker = Broker(client, backoff_base_ms=0)
        kept, lost, running = [job(gateway="") for _ in range(20)], [job(gateway="") for _ in range(5)], job(gateway="")
        for new in (running, *kept):
            await broker.enqueue(new)
        (before,) = await broker.claim("f", "w", 1)
        # WAIT is about the writes of its own connection, and so of all before them.
        primary.raw.set("synced", 1)
        assert primary.raw.execute_command("WAIT", 1, 10_000) == 1
        # From here on the replica gets nothing more.
        replica.raw.execute_command("REPLICAOF", "127.0.0.1", "1")
        for new in lost:
            await broker.enqueue(new)
        gone = await broker.claim("f", "w", 3)
        primary.end()
        proxy.server_path = replica.path
        with pytest.raises(AWAY):
            await broker.claim("f", "w", 1)
        with pytest.raises(ReadOnlyError):
            await broker.claim("f", "w", 1)
        going_on = asyncio.create_task(insist(lambda: broker.enqueue(lost[0]), PATIENCE_S))
        await asyncio.sleep(0.1)
        assert not going_on.done()
        replica.raw.execute_command("REPLICAOF", "NO", "ONE")
        assert (await going_on).created
        shot = oracle.check("f")
        assert set(shot.jobs) == {new.id for new in (running, *kept, lost[0])}
        assert await broker.done("f", [Completion(before.job_id, before.fence, b"r", b"u")]) == [Settled.DONE]
        again = await broker.claim("f", "w", 20)
        assert {claim.job_id for claim in gone} <= {claim.job_id for claim in again}
        assert min(claim.fence for claim in again) > max(claim.fence for claim in gone)
        stale = [Completion(claim.job_id, claim.fence, b"late", b"late") for claim in gone]
        assert await broker.done("f", stale) == [Settled.STALE] * len(gone)
        await finish(broker, [Completion(claim.job_id, claim.fence, b"r", b"u") for claim in again])
        assert {row["state"] for row in oracle.check("f").jobs.values()} == {JobState.SUCCEEDED}
        await client.aclose()
    oracle.close()


async def finish(broker: Broker, completions: list[Completion]) -> None:
    await broker.done("f", completions)
    for claim in await broker.claim("f", "w", 20):
        await broker.done("f", [Completion(claim.job_id, claim.fence, b"r", b"u")])
