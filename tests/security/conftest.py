"""The same real gateway, Valkey and store as the gateway's own tests, and a whole `stoker up` that asks for keys."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import httpx
import pytest

from stoker.runtime.gateway.settings import GatewaySettings
from stoker.runtime.local import LocalStack
from stoker.runtime.secret import kept_secret
from stoker.runtime.tenancy.api_key import Keyring
from tests.runtime.gateway.conftest import (
    SECRET,
    RunningGateway,
    broker,
    chat_model,
    cluster,
    deploy,
    gateway,
    http,
    login,
    redis,
    root,
    running,
    settings,
    store,
    valkey,
)

__all__ = [
    "broker",
    "chat_model",
    "cluster",
    "deploy",
    "gateway",
    "http",
    "login",
    "redis",
    "root",
    "settings",
    "store",
    "valkey",
]


@pytest.fixture(scope="session")
def keyed(settings: GatewaySettings) -> Iterator[RunningGateway]:
    """With everything that needs the deployment's secret."""
    with running(replace(settings, keys_secret=SECRET, secret=SECRET, gateway_id="gateway-keyed")) as gateway:
        yield gateway


@dataclass
class KeyedStack:
    """`stoker up --auth keys` with the operator's language model "chat": random weights, one word a token."""

    stack: LocalStack
    root: httpx.Client
    keys: dict[str, str]
    clients: contextlib.ExitStack

    def client(self, key: str = "") -> httpx.Client:
        headers = {"authorization": f"Bearer {key}"} if key else {}
        return self.clients.enter_context(httpx.Client(base_url=self.stack.url, headers=headers, timeout=60))

    def tenant(self, name: str) -> httpx.Client:
        """Logged in with a key of its own, which `keys` has."""
        if name not in self.keys:
            assert self.root.put(f"/v1/tenants/{name}", json={}).status_code == 201
            made = self.root.post(f"/v1/tenants/{name}/keys", json={"scopes": ["invoke", "deploy"]})
            self.keys[name] = made.json()["key"]
        return self.client(self.keys[name])


@pytest.fixture(scope="session")
def keyed_stack(tmp_path_factory: pytest.TempPathFactory, tiny_store_url: str) -> Iterator[KeyedStack]:
    data = tmp_path_factory.mktemp("keyed") / "data"
    with LocalStack(data, env={"STOKER_AUTH": "keys"}) as stack, contextlib.ExitStack() as clients:
        keyed = KeyedStack(stack, httpx.Client(), {}, clients)
        keyed.root = keyed.client(root_key(data))
        spec = {
            "kind": "llm",
            "weights": tiny_store_url,
            "scaling": {"idle_timeout_s": 600},
            "model": {"host_cache_bytes": 1 << 24},
        }
        made = keyed.root.put("/v1/functions/chat", json={"spec": spec})
        assert made.status_code == 201, made.text
        yield keyed


def root_key(data: Path) -> str:
    return Keyring(kept_secret(data)).root_text()
