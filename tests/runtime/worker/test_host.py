"""A host's claims come with their payloads, wherever those are."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import pytest

from stoker.queue.broker import Broker
from stoker.queue.client import connect
from stoker.queue.embedded import EmbeddedValkey
from stoker.queue.records import JobState, NewJob, new_job_id, pack, unpack
from stoker.runtime import payloads
from stoker.runtime.settings import Settings
from stoker.runtime.worker.host import Host

BIG = pack("x" * payloads.INLINE_LIMIT)


@pytest.fixture
async def host(tmp_path: Path) -> AsyncIterator[Host]:
    """Without what its claims don't use."""
    server = EmbeddedValkey(tmp_path / "valkey", tmp_path / "s")
    server.start()
    client = connect(server.url)
    unused = cast(Any, None)
    yield Host("h", "w", Settings(tmp_path), Broker(client), unused, unused, unused, ["cpu"])
    await client.aclose()
    server.stop()


async def test_small_and_big_payloads_and_one_that_is_gone(host: Host) -> None:
    small, big, gone = ids = [new_job_id("f") for _ in range(3)]
    for job_id, payload in zip(ids, (pack("small"), BIG, BIG), strict=True):
        carried = payloads.put(host.store, job_id, payload)
        await host.broker.enqueue(NewJob(id=job_id, function="f", tenant="a", payload=carried))
    host.store.delete(payloads.object_key(gone))
    claims = {claim.job_id: claim.payload for claim in await host.claim("f", 5)}
    assert claims == {small: pack("small"), big: BIG}
    record = await host.broker.job(gone)
    assert record is not None and record.state is JobState.FAILED
    error = unpack(cast(bytes, record.error))
    assert (error["type"], error["code"]) == ("internal_error", "ObjectMissing")
    assert gone in error["message"]
