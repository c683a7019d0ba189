"""Row 18: gateways and hosts need no more of Redis than their own keys and channels, and no dangerous command."""

from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from urllib.parse import urlsplit

import httpx
import pytest
from redis.asyncio import Redis
from redis.exceptions import NoPermissionError

from stoker.queue.broker import Broker
from stoker.queue.client import connect
from stoker.queue.embedded import EmbeddedValkey
from stoker.runtime.gateway.settings import GatewaySettings
from tests.runtime.gateway.conftest import RunningGateway, running
from tests.runtime.gateway.peers import Deploy, double, worker

# In the README of this folder: change both.
RULES = "on ~stoker:* resetchannels &stoker:* -@all +@read +@write +@pubsub +@transaction +@scripting +@connection"
RULES += " -@dangerous +info +time"


@pytest.fixture
async def restricted(redis: Redis, valkey: EmbeddedValkey) -> AsyncIterator[str]:
    """The URL of a user with these rights."""
    await redis.execute_command("ACL", "SETUSER", "stoker", ">a-password", *RULES.split())
    parts = urlsplit(valkey.url)
    yield parts._replace(netloc=f"stoker:a-password@{parts.netloc}").geturl()
    await redis.execute_command("ACL", "DELUSER", "stoker")


@pytest.fixture
def least(restricted: str, settings: GatewaySettings) -> Iterator[RunningGateway]:
    with running(replace(settings, redis_url=restricted, gateway_id="gateway-least")) as gateway:
        yield gateway


async def test_gateway_and_worker_do_with_their_own_keys(
    least: RunningGateway, restricted: str, deploy: Deploy
) -> None:
    function, client = await deploy(), connect(restricted)
    async with httpx.AsyncClient(base_url=least.url, timeout=20) as http:
        async with worker(Broker(client), function, double):
            assert (await http.post(f"/v1/functions/{function}", json=4)).json() == 8
            job = (await http.post(f"/v1/functions/{function}/jobs", json=4)).json()["id"]
        assert (await http.get(f"/v1/jobs/{job}")).status_code == 200
        assert (await http.put("/v1/tenants/acme", json={"limits": {"budget_usd": 1}})).status_code == 201
        assert (await http.get("/readyz")).status_code == 200
        assert (await http.delete("/v1/tenants/acme")).status_code == 200
    await client.aclose()


async def test_whoever_has_that_login_gets_no_further(restricted: str) -> None:
    client = connect(restricted)
    refused = [("FLUSHALL",), ("CONFIG", "SET", "maxmemory", "1"), ("ACL", "LIST"), ("KEYS", "*"), ("MODULE", "LIST")]
    refused += [("GET", "another"), ("SET", "another", "1"), ("PUBLISH", "another", "x"), ("SHUTDOWN",), ("MONITOR",)]
    refused += [("EVAL", "return redis.call('GET', KEYS[1])", "1", "another"), ("REPLICAOF", "NO", "ONE")]
    for command in refused:
        with pytest.raises(NoPermissionError):
            await client.execute_command(*command)
    await client.aclose()
