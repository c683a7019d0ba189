"""A real Valkey, emptied for each test."""

from collections.abc import AsyncIterator, Iterator

import pytest
from redis.asyncio import Redis

from stoker.queue.broker import Broker
from stoker.queue.client import connect
from stoker.queue.cluster import Cluster
from stoker.queue.embedded import EmbeddedValkey


@pytest.fixture(scope="session")
def valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedValkey]:
    server = EmbeddedValkey(tmp_path_factory.mktemp("valkey"))
    server.start()
    yield server
    server.stop()


@pytest.fixture
async def redis(valkey: EmbeddedValkey) -> AsyncIterator[Redis]:
    client = connect(valkey.url)
    await client.flushall()
    yield client
    await client.aclose()


@pytest.fixture
def cluster(redis: Redis) -> Cluster:
    return Cluster(redis)


@pytest.fixture
def broker(redis: Redis) -> Broker:
    return Broker(redis)
