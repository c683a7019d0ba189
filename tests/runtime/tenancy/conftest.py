"""A real Valkey, emptied for each test; whatever a test leaves there has a TTL."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from redis.asyncio import Redis

from stoker.coldstart.store import ObjectStore, open_store
from stoker.queue import keys
from stoker.queue.broker import Broker
from stoker.queue.client import connect
from stoker.queue.embedded import EmbeddedValkey
from stoker.runtime.tenancy import audit, directory, ledger
from stoker.runtime.tenancy.directory import Directory
from stoker.runtime.tenancy.ledger import Ledger

PERMANENT = directory.PERMANENT | ledger.PERMANENT | audit.PERMANENT


@pytest.fixture(scope="session")
def valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedValkey]:
    valkey = EmbeddedValkey(tmp_path_factory.mktemp("valkey"))
    valkey.start()
    yield valkey
    valkey.stop()


@pytest.fixture
async def redis(valkey: EmbeddedValkey) -> AsyncIterator[Redis]:
    client = connect(valkey.url)
    await client.flushall()
    yield client
    names = [name.decode() async for name in client.scan_iter()]
    endless = [name for name in names if await client.ttl(name) == -1]
    assert [name for name in endless if name not in PERMANENT and not keys.is_permanent(name)] == []
    await client.aclose()


@pytest.fixture
def tenants(redis: Redis) -> Directory:
    return Directory(redis)


@pytest.fixture
def broker(redis: Redis) -> Broker:
    return Broker(redis)


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    return open_store((tmp_path / "store").as_uri())


@pytest.fixture
def books(redis: Redis, tenants: Directory, store: ObjectStore) -> Ledger:
    return Ledger(redis, tenants, store)
