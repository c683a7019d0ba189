"""A gateway as it runs for users: a real server on a real port over a real Valkey, and workers that are real peers."""

import contextlib
import itertools
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import httpx
import pytest
import uvicorn
from redis.asyncio import Redis

from stoker.coldstart.store import ObjectStore, open_store
from stoker.queue.broker import Broker
from stoker.queue.client import connect
from stoker.queue.cluster import Cluster
from stoker.queue.embedded import EmbeddedValkey
from stoker.runtime.gateway.context import Gateway
from stoker.runtime.gateway.server import server
from stoker.runtime.gateway.settings import GatewaySettings
from stoker.runtime.spec import FunctionSpec
from stoker.runtime.tenancy.api_key import Keyring

from .peers import Deploy

KEEPALIVE_S = 0.3
BODY_LIMIT = 200_000

numbers = itertools.count()
SECRET = "the secret of this deployment"

Login = Callable[[str], httpx.AsyncClient]


@pytest.fixture(scope="session")
def valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedValkey]:
    valkey = EmbeddedValkey(tmp_path_factory.mktemp("valkey"))
    valkey.start()
    yield valkey
    valkey.stop()


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> ObjectStore:
    return open_store(tmp_path_factory.mktemp("store").as_uri())


@dataclass
class RunningGateway:
    """uvicorn in a thread of its own, so that blocking clients can be used too."""

    settings: GatewaySettings
    url: str = ""
    _server: uvicorn.Server = field(init=False)
    _thread: threading.Thread = field(init=False)

    def start(self) -> None:
        self._server = server(self.settings, "127.0.0.1", 0)
        self._thread = threading.Thread(target=self._server.run)
        self._thread.start()
        deadline = time.monotonic() + 20
        while not self._server.started:
            assert self._thread.is_alive() and time.monotonic() < deadline, "the gateway did not start"
            time.sleep(0.01)
        port = self._server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"

    @property
    def inside(self) -> Gateway:
        return self._server.config.loaded_app.state.gateway

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join(20)
        assert not self._thread.is_alive()


@contextlib.contextmanager
def running(settings: GatewaySettings) -> Iterator[RunningGateway]:
    gateway = RunningGateway(settings)
    gateway.start()
    try:
        yield gateway
    finally:
        gateway.stop()


@pytest.fixture(scope="session")
def settings(valkey: EmbeddedValkey, store: ObjectStore) -> GatewaySettings:
    return GatewaySettings(
        redis_url=valkey.url,
        store_url=store.url,
        max_body_bytes=BODY_LIMIT,
        max_bundle_bytes=BODY_LIMIT,
        max_file_bytes=2 * BODY_LIMIT,
        body_timeout_s=1.0,
        keepalive_s=KEEPALIVE_S,
    )


@pytest.fixture(scope="session")
def gateway(settings: GatewaySettings) -> Iterator[RunningGateway]:
    with running(settings) as gateway:
        yield gateway


@pytest.fixture
def second_gateway(settings: GatewaySettings) -> Iterator[RunningGateway]:
    with running(replace(settings, gateway_id="gateway-second")) as gateway:
        yield gateway


@pytest.fixture
async def http(gateway: RunningGateway) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=gateway.url, timeout=20) as client:
        yield client


@pytest.fixture
async def redis(valkey: EmbeddedValkey) -> AsyncIterator[Redis]:
    client = connect(valkey.url)
    yield client
    await client.aclose()


@pytest.fixture
def broker(redis: Redis) -> Broker:
    return Broker(redis)


@pytest.fixture
def cluster(redis: Redis) -> Cluster:
    return Cluster(redis)


@pytest.fixture
async def deploy(cluster: Cluster) -> AsyncIterator[Deploy]:
    """Registers a Python function under a name of its own and returns the name."""
    names: list[str] = []

    async def put(**fields: Any) -> str:
        name = f"function_{next(numbers)}"
        names.append(name)
        spec = FunctionSpec(name=name, kind="python", code="0" * 64, entry="m:f", **fields)
        await cluster.put_function(name, spec.to_dict())
        return name

    yield put
    for name in names:
        await cluster.delete_function(name)


@pytest.fixture
async def chat_model(cluster: Cluster, smollm2_store_url: str) -> AsyncIterator[str]:
    """A deployed language model: the demo model's name, tokenizer and template."""
    name = f"chat_{next(numbers)}"
    spec = FunctionSpec(name=name, kind="llm", weights=smollm2_store_url, version="1")
    await cluster.put_function(name, spec.to_dict())
    yield name
    await cluster.delete_function(name)


@pytest.fixture(scope="session")
def keyed(settings: GatewaySettings, store: ObjectStore) -> Iterator[RunningGateway]:
    with running(replace(settings, keys_secret=SECRET, gateway_id="gateway-keyed")) as gateway:
        yield gateway


@pytest.fixture
async def login(keyed: RunningGateway) -> AsyncIterator[Login]:
    async with contextlib.AsyncExitStack() as stack:
        clients: list[httpx.AsyncClient] = []

        def client(key: str) -> httpx.AsyncClient:
            headers = {"authorization": f"Bearer {key}"} if key else {}
            clients.append(httpx.AsyncClient(base_url=keyed.url, headers=headers, timeout=20, verify=False))
            stack.push_async_callback(clients[-1].aclose)
            return clients[-1]

        yield client


@pytest.fixture
async def root(login: Login) -> AsyncIterator[httpx.AsyncClient]:
    """The operator; the tenants it made are gone afterwards."""
    client = login(Keyring(SECRET).root_text())
    yield client
    for tenant in (await client.get("/v1/tenants")).json()["data"]:
        await client.delete(f"/v1/tenants/{tenant['name']}")
