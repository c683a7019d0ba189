import redis
from queue_oracle import Oracle
from redis.asyncio import Redis

from stoker.queue import keys
from stoker.queue.broker import Broker
from stoker.queue.records import Completion, Emission, Failure


async def test_chunks_are_kept_in_order(broker: Broker, start) -> None:
    claim = await start(stream=True)
    data = [b"", b"\x00\xff", b"x" * 100_000]
    emissions = [Emission(claim.job_id, claim.fence, seq, part) for seq, part in enumerate(data, 1)]
    assert await broker.emit("f", emissions[:2]) == []
    assert await broker.emit("f", emissions[2:]) == []
    chunks = await broker.chunks(claim.job_id)
    assert [chunk.data for chunk in chunks] == data
    assert {(chunk.fence, chunk.attempt) for chunk in chunks} == {(claim.fence, 1)}
    assert [chunk.data for chunk in await broker.chunks(claim.job_id, chunks[0].id)] == data[1:]
    assert await broker.chunks(claim.job_id, chunks[-1].id) == []


async def test_one_round_trip_for_all_jobs_of_a_step(broker: Broker, client: Redis, start, raw: redis.Redis) -> None:
    claims = [await start(stream=True, gateway=f"gw{i % 2}") for i in range(10)]
    await broker.emit("f", [Emission(claims[0].job_id, claims[0].fence, 1, b"x")])
    raw.config_resetstat()
    await broker.emit("f", [Emission(claim.job_id, claim.fence, 2, b"x") for claim in claims])
    calls = {name: row["calls"] for name, row in raw.info("commandstats").items()}
    assert calls["cmdstat_evalsha"] == 1
    assert calls["cmdstat_xadd"] == 10
    assert calls["cmdstat_publish"] == 2


async def test_a_replay_adds_nothing(broker: Broker, start, oracle: Oracle) -> None:
    claim = await start(stream=True)
    emissions = [Emission(claim.job_id, claim.fence, seq, b"%d" % seq) for seq in (1, 2, 3)]
    for part in (emissions[:2], emissions[:2], emissions, emissions[1:]):
        assert await broker.emit("f", part) == []
    assert [chunk.data for chunk in await broker.chunks(claim.job_id)] == [b"1", b"2", b"3"]


async def test_a_stale_fence_emits_nothing(broker: Broker, client: Redis, start) -> None:
    old = await start(stream=True, max_attempts=9)
    await client.zadd(keys.key("f", "lease"), {old.job_id: 1})
    await broker.tick("f")
    late = Emission(old.job_id, old.fence, 1, b"late")
    assert await broker.emit("f", [late]) == [old.job_id]
    (new,) = await broker.claim("f", "w", 1)
    assert await broker.emit("f", [late, Emission(old.job_id, new.fence, 1, b"fresh"), late]) == [old.job_id]
    await broker.done("f", [Completion(new.job_id, new.fence, b"", b"")])
    assert await broker.emit("f", [Emission(old.job_id, new.fence, 2, b"after the end")]) == [old.job_id]
    assert [chunk.data for chunk in await broker.chunks(old.job_id)] == [b"fresh"]


async def test_each_attempt_counts_its_own_sequence(broker: Broker, start) -> None:
    claim = await start(stream=True)
    await broker.emit("f", [Emission(claim.job_id, claim.fence, seq, b"a") for seq in (1, 2)])
    await broker.fail("f", [Failure(claim.job_id, claim.fence, b"", retry=True, counts=False)])
    (second,) = await broker.claim("f", "w", 1)
    await broker.emit("f", [Emission(claim.job_id, second.fence, 1, b"b")])
    assert [chunk.data for chunk in await broker.chunks(claim.job_id)] == [b"a", b"a", b"b"]


async def test_no_stream_key_for_a_job_that_never_streams(broker: Broker, client: Redis, start) -> None:
    silent, plain = await start(stream=True), await start(stream=False)
    assert await broker.emit("f", [Emission(plain.job_id, plain.fence, 1, b"progress")]) == []
    await broker.fail("f", [Failure(item.job_id, item.fence, b"", retry=True) for item in (silent, plain)])
    await broker.cancel(plain.job_id)
    await broker.cancel(silent.job_id)
    assert await client.exists(keys.chunks("f", plain.job_id), keys.chunks("f", silent.job_id)) == 0


async def test_an_entry_names_its_attempt_and_its_number(broker: Broker, start) -> None:
    """So one that is sent again is known without a look at the record, and the one before it too."""
    claim = await start(stream=True)
    await broker.emit("f", [Emission(claim.job_id, claim.fence, seq, b"a") for seq in (1, 2)])
    await broker.fail("f", [Failure(claim.job_id, claim.fence, b"", retry=True, counts=False)])
    (second,) = await broker.claim("f", "w", 1)
    assert [chunk.id for chunk in second.chunks] == [f"{claim.fence}-1", f"{claim.fence}-2"]
    await broker.emit("f", [Emission(claim.job_id, second.fence, 1, b"b")])
    assert (await broker.chunks(claim.job_id))[-1].id == f"{second.fence}-1"


async def test_a_cost_alone_is_no_chunk(broker: Broker, start) -> None:
    claim = await start(stream=True, cost=1)
    parts = [Emission(claim.job_id, claim.fence, 1, b"a"), Emission(claim.job_id, claim.fence, 1, b"", 5.0)]
    assert await broker.emit("f", [*parts, Emission(claim.job_id, claim.fence, 2, b"b", 6.0)]) == []
    assert [chunk.data for chunk in await broker.chunks(claim.job_id)] == [b"a", b"b"]
