import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
import redis
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError

from stoker.queue import events as events_module
from stoker.queue import keys
from stoker.queue.broker import Broker
from stoker.queue.events import Ending, Event, EventBus, Subscription
from stoker.queue.records import Claim, Completion, Emission, Failure, JobState, NewJob, new_job_id

MakeBus = Callable[..., Awaitable[EventBus]]


@pytest.fixture
async def make_bus(server_url: str, broker: Broker) -> AsyncIterator[MakeBus]:
    buses: list[EventBus] = []

    async def make(gateway: str = "gw", level_s: float = 60) -> EventBus:
        bus = EventBus(server_url, broker, gateway, level_s=level_s)
        await bus.start()
        buses.append(bus)
        return bus

    yield make
    for bus in buses:
        await bus.close()


async def collect(subscription: Subscription) -> list[Event]:
    async with asyncio.timeout(10):
        return [event async for event in subscription]


async def run_job(broker: Broker, new: NewJob) -> Claim:
    await broker.enqueue(new)
    (claim,) = await broker.claim(new.function, "w", 1)
    return claim


async def emit(broker: Broker, claim: Claim, *data: bytes, first: int = 1) -> None:
    emissions = [Emission(claim.job_id, claim.fence, seq, part) for seq, part in enumerate(data, first)]
    assert await broker.emit(claim.function, emissions) == []


async def finish(broker: Broker, claim: Claim, result: bytes = b"r") -> None:
    await broker.done(claim.function, [Completion(claim.job_id, claim.fence, result, b"u")])


def data(events: list[Event]) -> list[bytes]:
    return [event.data for event in events if event.kind == "chunk"]


async def test_a_stream_arrives_whole_and_in_order(make_bus: MakeBus, broker: Broker, job) -> None:
    bus = await make_bus()
    new = job(stream=True)
    async with bus.watch(new.id) as subscription:
        claim = await run_job(broker, new)
        for i in range(0, 60, 3):
            await emit(broker, claim, *(b"%d" % n for n in (i, i + 1, i + 2)), first=i + 1)
        await finish(broker, claim)
        events = await collect(subscription)
    assert data(events) == [b"%d" % n for n in range(60)]
    assert [event.kind for event in events].count("end") == 1
    end = events[-1]
    assert (end.kind, end.state, end.attempt) == ("end", JobState.SUCCEEDED, 1)
    assert end.ending == Ending(result=b"r", error=None, usage=b"u", notes=None, reason="")
    assert [chunk.id for chunk in await broker.chunks(new.id)] == [event.id for event in events[:-1]]


async def test_a_job_without_a_stream_still_says_when_it_ends(
    make_bus: MakeBus, broker: Broker, client: Redis, job
) -> None:
    bus = await make_bus()
    new = job(stream=False)
    subscription = bus.watch(new.id)
    claim = await run_job(broker, new)
    await emit(broker, claim, b"progress")
    await finish(broker, claim)
    events = await collect(subscription)
    assert [(event.kind, event.id) for event in events] == [("chunk", ""), ("end", "")]
    assert not await client.exists(keys.chunks("f", new.id))


@pytest.mark.parametrize("size", [60_000, 70_000])
async def test_small_results_travel_with_the_event(make_bus: MakeBus, broker: Broker, job, size: int) -> None:
    bus = await make_bus()
    new = job()
    subscription = bus.watch(new.id)
    await finish(broker, await run_job(broker, new), b"x" * size)
    (end,) = await collect(subscription)
    record = await broker.job(new.id)
    assert record is not None and record.result == b"x" * size
    assert end.ending is None if size > 65536 else end.ending and end.ending.result == record.result


async def test_every_way_to_end_is_an_event(make_bus: MakeBus, broker: Broker, client: Redis, job) -> None:
    bus = await make_bus()
    jobs = {name: job(max_attempts=1) for name in ("cancel", "fail", "dead", "lost")}
    jobs["expire"] = job(finish_within_ms=100, priority=2)
    subscriptions = {name: bus.watch(new.id) for name, new in jobs.items()}
    for new in jobs.values():
        await broker.enqueue(new)
    claims = {claim.job_id: claim for claim in await broker.claim("f", "w", 4)}
    failures = [
        Failure(jobs[name].id, claims[jobs[name].id].fence, b"e", retry=name == "dead") for name in ("fail", "dead")
    ]
    await broker.fail("f", failures)
    await broker.cancel(jobs["cancel"].id, "client left")
    await client.zadd(keys.key("f", "lease"), {jobs["lost"].id: 1})
    await client.zadd(keys.key("f", "dl"), {jobs["expire"].id: 1})
    await broker.tick("f")
    ends = {name: (await collect(subscription))[-1] for name, subscription in subscriptions.items()}
    assert {name: end.state for name, end in ends.items()} == {
        "cancel": JobState.CANCELLED,
        "fail": JobState.FAILED,
        "dead": JobState.DEAD,
        "lost": JobState.DEAD,
        "expire": JobState.EXPIRED,
    }
    endings = {name: end.ending for name, end in ends.items() if end.ending is not None}
    assert endings["cancel"].reason == "client left"
    assert endings["fail"].error == endings["dead"].error == b"e"
    assert endings["lost"].reason == "lost its worker w in attempt 1 of 1"


async def test_attempts_have_a_visible_boundary(make_bus: MakeBus, broker: Broker, client: Redis, job) -> None:
    bus = await make_bus()
    new = job(stream=True, max_attempts=5)
    subscription = bus.watch(new.id)
    claim = await run_job(broker, new)
    await emit(broker, claim, b"a")
    await client.zadd(keys.key("f", "lease"), {new.id: 1})
    await broker.tick("f")
    (claim,) = await broker.claim("f", "w", 1)
    await emit(broker, claim, b"b")
    await broker.fail("f", [Failure(new.id, claim.fence, b"", retry=True, counts=False)])
    (claim,) = await broker.claim("f", "w", 1)
    await emit(broker, claim, b"c")
    await finish(broker, claim)
    events = await collect(subscription)
    assert [(event.kind, event.attempt) for event in events] == [
        ("chunk", 1),
        ("retry", 1),
        ("chunk", 2),
        ("retry", 2),
        ("chunk", 2),
        ("end", 2),
    ]
    assert [chunk.data for chunk in await broker.chunks(new.id)] == [b"a", b"b", b"c"]


async def test_a_reader_comes_back_with_the_last_id_it_saw(make_bus: MakeBus, broker: Broker, job) -> None:
    first, second = await make_bus("gw"), await make_bus("gw2")
    new = job(stream=True)
    subscription = first.watch(new.id)
    claim = await run_job(broker, new)
    await emit(broker, claim, b"1", b"2", b"3")
    seen = [await anext(subscription) for _ in range(2)]
    resumed = second.watch(new.id, seen[-1].id)
    assert await broker.listen(new.id, "gw2")
    assert (await anext(resumed)).data == b"3"
    await emit(broker, claim, b"4", first=4)
    await finish(broker, claim)
    assert data(await collect(resumed)) == [b"4"]
    assert data(await collect(subscription)) == [b"3", b"4"]


async def test_listening_to_an_ended_job_gives_all_of_it(make_bus: MakeBus, broker: Broker, job) -> None:
    bus = await make_bus()
    new = job(stream=True, gateway="")
    claim = await run_job(broker, new)
    await emit(broker, claim, *(b"%d" % n for n in range(600)))
    await finish(broker, claim)
    subscription = bus.watch(new.id)
    assert not await broker.listen(new.id, "gw")
    events = await collect(subscription)
    assert data(events) == [b"%d" % n for n in range(600)]
    assert events[-1].state is JobState.SUCCEEDED


async def test_listening_to_an_unknown_job_is_no_hung_request(make_bus: MakeBus, broker: Broker) -> None:
    bus = await make_bus()
    job_id = new_job_id("f")
    subscription = bus.watch(job_id)
    assert not await broker.listen(job_id, "gw")
    (end,) = await collect(subscription)
    assert (end.kind, end.state, end.data) == ("end", None, b"")


async def test_a_job_has_a_bounded_number_of_listeners(broker: Broker, client: Redis, start) -> None:
    claim = await start(gateway="gw0")
    for i in range(1, 12):
        for _ in range(2):
            assert await broker.listen(claim.job_id, f"gw{i}")
    gates = await client.hget(keys.key("f", f"j:{claim.job_id}"), "gates")  # type: ignore[misc]
    assert gates == ",".join(f"gw{i}" for i in range(4, 12)).encode()


async def test_messages_lost_on_a_cut_connection_are_read_again(
    make_bus: MakeBus, broker: Broker, raw: redis.Redis, job
) -> None:
    bus = await make_bus()
    jobs = [job(stream=True) for _ in range(20)]
    subscriptions = [bus.watch(new.id) for new in jobs]
    for new in jobs:
        await broker.enqueue(new)
    claims = await broker.claim("f", "w", 20)
    for seq in range(1, 31):
        if seq % 10 == 0:
            raw.client_kill_filter(_type="pubsub")
        await broker.emit("f", [Emission(claim.job_id, claim.fence, seq, b"%d" % seq) for claim in claims])
        await asyncio.sleep(0.003)
    raw.client_kill_filter(_type="pubsub")
    await broker.done("f", [Completion(claim.job_id, claim.fence, b"r", b"u") for claim in claims])
    for subscription in subscriptions:
        events = await collect(subscription)
        assert data(events) == [b"%d" % seq for seq in range(1, 31)]
        assert events[-1].state is JobState.SUCCEEDED


async def test_the_level_check_finds_what_was_never_published(make_bus: MakeBus, broker: Broker, job) -> None:
    bus = await make_bus(level_s=0.05)
    new = job(stream=True, gateway="another gateway")
    subscription = bus.watch(new.id)
    claim = await run_job(broker, new)
    await emit(broker, claim, b"1")
    await finish(broker, claim)
    assert data(await collect(subscription)) == [b"1"]


async def test_a_record_that_vanishes_ends_the_subscription(
    make_bus: MakeBus, broker: Broker, raw: redis.Redis, job
) -> None:
    bus = await make_bus(level_s=0.05)
    new = job(stream=True)
    subscription = bus.watch(new.id)
    await broker.enqueue(new)
    await asyncio.sleep(0.2)
    raw.flushall()
    (end,) = await collect(subscription)
    assert (end.kind, end.state) == ("end", None)


async def test_a_slow_reader_does_not_fill_the_memory(
    make_bus: MakeBus, broker: Broker, job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events_module, "MOST_WAITING", 10)
    monkeypatch.setattr(events_module, "ENTRIES_PER_READ", 8)
    bus = await make_bus()
    new = job(stream=True)
    subscription = bus.watch(new.id)
    claim = await run_job(broker, new)
    for i in range(1, 201):
        await emit(broker, claim, b"%d" % i, first=i)
    await finish(broker, claim)
    await asyncio.sleep(0.05)
    assert len(subscription._events) <= 18
    assert data(await collect(subscription)) == [b"%d" % i for i in range(1, 201)]


async def test_a_slow_reader_of_big_chunks_holds_few_of_them(
    make_bus: MakeBus, broker: Broker, job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events_module, "MOST_WAITING_BYTES", 100_000)
    bus = await make_bus()
    new = job(stream=True)
    subscription = bus.watch(new.id)
    claim = await run_job(broker, new)
    chunks = [b"%3d" % i + b"x" * 50_000 for i in range(60)]
    for i, chunk in enumerate(chunks, start=1):
        await emit(broker, claim, chunk, first=i)
    await finish(broker, claim)
    await asyncio.sleep(0.05)
    assert len(subscription._events) <= 4
    assert data(await collect(subscription)) == chunks


async def test_what_is_read_at_once_is_bounded_in_bytes(broker: Broker, job) -> None:
    """Pages of 32 entries until there is a mebibyte, over all jobs of one call; those behind get nothing yet."""
    first, second = job(stream=True), job(stream=True)
    chunk = b"x" * 100_000
    for new in (first, second):
        claim = await run_job(broker, new)
        for i in range(1, 71):
            await emit(broker, claim, chunk, first=i)
    found, rest = await broker.peek(first.function, [(first.id, "0"), (second.id, "0")], 256)
    assert found and rest
    assert (len(found.entries), found.whole) == (32, False)
    assert (len(rest.entries), rest.whole) == (0, False)
    (again,) = await broker.peek(first.function, [(second.id, "0")], 20)
    assert again and (len(again.entries), again.whole) == (20, False)


async def test_readers_of_one_job_are_independent(make_bus: MakeBus, broker: Broker, job) -> None:
    bus = await make_bus()
    new = job(stream=True)
    left, right = bus.watch(new.id), bus.watch(new.id)
    claim = await run_job(broker, new)
    await emit(broker, claim, b"1")
    assert (await anext(left)).data == b"1"
    await left.close()
    await finish(broker, claim)
    assert [event.kind for event in await collect(right)] == ["chunk", "end"]


async def test_closing_ends_whoever_waits(make_bus: MakeBus, job) -> None:
    bus = await make_bus()
    first, second = bus.watch(job().id), bus.watch(job().id)
    waiting = [asyncio.create_task(collect(subscription)) for subscription in (first, second)]
    await asyncio.sleep(0)
    await first.close()
    await bus.close()
    assert await asyncio.gather(*waiting) == [[], []]


async def test_only_ids_can_be_watched(make_bus: MakeBus, job) -> None:
    bus = await make_bus()
    for job_id, after in [("f", "0"), (job().id, "yesterday")]:
        with pytest.raises(ValueError):
            bus.watch(job_id, after)


async def test_a_message_from_elsewhere_does_no_harm(
    make_bus: MakeBus, broker: Broker, raw: redis.Redis, job, caplog: pytest.LogCaptureFixture
) -> None:
    bus = await make_bus()
    new = job(stream=True)
    subscription = bus.watch(new.id)
    raw.publish(keys.gateway_channel("gw"), b"no msgpack")
    await finish(broker, await run_job(broker, new))
    assert [event.kind for event in await collect(subscription)] == ["end"]
    assert "not understood" in caplog.text


async def test_starting_without_a_server_is_an_error(broker: Broker, tmp_path) -> None:
    bus = EventBus(f"unix://{tmp_path}/none", broker, "gw")
    with pytest.raises(RedisConnectionError):
        await bus.start()
    await bus.close()
