"""The server executes a script and the network loses its reply: asking again gives that reply, and happens once."""

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import redis
from redis.exceptions import ConnectionError as RedisConnectionError

import stoker.queue.broker
from stoker.queue.broker import Broker
from stoker.queue.client import connect
from stoker.queue.deliveries import Deliveries, Delivery, Try
from stoker.queue.embedded import EmbeddedValkey
from stoker.queue.listing import Listing
from stoker.queue.records import Claim, Completion, Emission, Failure, JobState, Metered, NewJob, Settled, new_job_id
from stoker.queue.scripts import script
from tests.faults.queue.conftest import MakeJob
from tests.faults.queue.proxy import Proxy
from tests.queue.queue_oracle import Oracle, Snapshot

FOLDER = Path(stoker.queue.broker.__file__).parent
DEAD = new_job_id("f")
SCRIPTS = sorted(path.stem for path in FOLDER.glob("*.lua") if path.read_text().startswith("-- uses: "))

Call = Callable[[Broker, NewJob, Claim, NewJob], Awaitable[Any]]


async def replay_the_dead(broker: Broker, new: NewJob, claim: Claim, waiting: NewJob) -> JobState | None:
    """The one that was dead from the start."""
    return await broker.replay(DEAD, "once")


TAKEN = Delivery(f"{DEAD}.0", "https://example.com/", "a", JobState.DEAD, 0, "pending", 0, b"", lease=str(4 * 10**12))


async def say_what_became_of_it(broker: Broker, *_: object) -> bool:
    what = Try(1.0, 0.1, 500, "")
    return await Deliveries(broker._redis).tried(TAKEN, what, "pending", 60, b"said")


# With a claimed job and a job that waits; each call is made twice, and its second answer is looked at.
CALLS: dict[str, tuple[Call, Callable[[Any], bool]]] = {
    "enqueue": (lambda broker, new, _, __: broker.enqueue(new), lambda answer: answer.created and answer.queued == 2),
    "claim": (lambda broker, *_: broker.claim("f", "w2", 5), lambda answer: len(answer) == 1),
    "beat": (
        lambda broker, _, claim, __: broker.beat("f", "w", {claim.job_id: claim.fence}),
        lambda answer: not answer,
    ),
    "emit": (
        lambda broker, _, claim, __: broker.emit("f", [Emission(claim.job_id, claim.fence, 1, b"x")]),
        lambda answer: answer == [],
    ),
    "done": (
        lambda broker, _, claim, __: broker.done("f", [Completion(claim.job_id, claim.fence, b"r", b"u")]),
        lambda answer: answer == [Settled.DONE],
    ),
    "fail": (
        lambda broker, _, claim, __: broker.fail("f", [Failure(claim.job_id, claim.fence, b"e", retry=True)]),
        lambda answer: answer == [Settled.RETRYING],
    ),
    "cancel": (
        lambda broker, _, __, waiting: broker.cancel(waiting.id),
        lambda answer: answer is JobState.CANCELLED,
    ),
    "meter": (
        lambda broker, _, claim, __: broker.meter("f", [Metered(claim.job_id, claim.fence, b"u")]),
        lambda answer: answer == 0,
    ),
    "tick": (lambda broker, *_: broker.tick("f"), lambda answer: answer == 0),
    "aside": (
        lambda broker, _, claim, __: broker.set_aside("f", {claim.job_id: claim.fence}),
        lambda answer: answer == 1,
    ),
    "led": (lambda broker, _, claim, waiting: broker.led_to(claim.job_id, waiting.id), lambda answer: answer is True),
    "forget": (lambda broker, *_: broker.forget_key(DEAD, "a", "its key"), lambda answer: answer is None),
    "look": (lambda broker, _, __, waiting: broker.job(waiting.id), lambda answer: answer.state is JobState.QUEUED),
    "peek": (
        lambda broker, _, __, waiting: broker.peek("f", [(waiting.id, "0")], 5),
        lambda answer: answer[0].state is JobState.QUEUED,
    ),
    "listen": (lambda broker, _, __, waiting: broker.listen(waiting.id, "gw"), lambda answer: answer is True),
    "stat": (lambda broker, *_: broker.backlogs(["f"]), lambda answer: answer["f"].queued == 1),
    "dead": (lambda broker, *_: broker.dead_letters("f"), lambda answer: len(answer) == 1),
    "replay": (replay_the_dead, lambda answer: answer is JobState.QUEUED),
    # Nobody heard of what was taken: it comes back with the end of its lease.
    "due": (lambda broker, *_: Deliveries(broker._redis).take(["f"], 5, 60_000), lambda answer: answer == []),
    "tried": (say_what_became_of_it, lambda answer: answer is False),
    "redeliver": (lambda broker, *_: Deliveries(broker._redis).again(TAKEN.id), lambda answer: answer is True),
    "list": (lambda broker, *_: Listing(broker._redis).page(["f"], 9), lambda answer: len(answer.jobs) == 3),
    "purge": (lambda broker, *_: broker.purge_function("f"), lambda answer: answer is None),
}


def test_every_script_has_its_case() -> None:
    assert sorted(CALLS) == SCRIPTS


@pytest.mark.parametrize("name", sorted(CALLS))
async def test_a_lost_reply(
    server: EmbeddedValkey,
    raw: redis.Redis,
    broker: Broker,
    oracle: Oracle,
    job: MakeJob,
    tmp_path: Path,
    name: str,
) -> None:
    for script_name in SCRIPTS:
        raw.script_load(script(script_name).source)
    await broker.enqueue(job(id=DEAD, max_attempts=1, webhook=TAKEN.url))
    (dying,) = await broker.claim("f", "w", 1)
    await broker.fail("f", [Failure(DEAD, dying.fence, b"e", retry=True)])
    first, waiting, new = job(), job(), job()
    await broker.enqueue(first)
    (claim,) = await broker.claim("f", "w", 1)
    await broker.enqueue(waiting)
    if name == "meter":
        await broker.cancel(first.id)
    if name == "tried":
        raw.zadd("stoker:q:{f}:wd", {TAKEN.id: TAKEN.lease})
    if name == "tick":
        raw.zadd("stoker:q:{f}:lease", {first.id: 1}, xx=True)
    call, right = CALLS[name]
    async with Proxy(tmp_path / "p", server.socket_path).running() as proxy:
        client = connect(proxy.url)
        cut_off = Broker(client, backoff_base_ms=0)
        cut_off._registered.add("f")
        await client.ping()
        proxy.lose_next_reply()
        with pytest.raises(RedisConnectionError):
            await call(cut_off, new, claim, waiting)
        assert proxy.lost == 1
        executed = but_for_renewals(oracle.check("f"))
        answer = await call(cut_off, new, claim, waiting)
        await client.aclose()
    assert right(answer), answer
    ((_, tries),) = await Deliveries(broker._redis).of_job(DEAD, 1)
    assert len(tries) == (name == "tried")
    assert but_for_renewals(oracle.check("f")) == executed


def but_for_renewals(shot: Snapshot) -> Snapshot:
    """Who asks again is alive: a repeated claim or beat renews the lease, and what is to be sent again is due now.
    A purge goes on until all is forgotten."""
    shot.zsets["lease"] = dict.fromkeys(shot.zsets["lease"], 0.0)
    shot.zsets["wd"] = dict.fromkeys(shot.zsets["wd"], 0.0)
    shot.virtual_times = {}
    return shot
