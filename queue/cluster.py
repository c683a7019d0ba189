"""The cluster's shared memory: deployed functions, host reports, wanted replicas, the fleet of hosts, the controller's
lease and its bell.

Values are msgpack maps that the queue doesn't interpret. Only the controller's lease holder writes wanted replicas.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import RedisError

from stoker.queue.records import pack, unpack

# One hash tag for all, so that a cluster-mode server has them in one slot, where scripts and transactions span them.
FUNCTIONS = "stoker:{cluster}:functions"
WANTED = "stoker:{cluster}:wanted"
LEADER = "stoker:{cluster}:leader"
LEADER_FENCE = "stoker:{cluster}:leader:fence"
BELL = "stoker:{cluster}:controller:bell"
HOST_PREFIX = "stoker:{cluster}:host:"
FAILING = "stoker:{cluster}:failing"
HOSTS = "stoker:{cluster}:hosts"
HOSTS_WANTED = "stoker:{cluster}:hosts:wanted"
FLEET = "stoker:{cluster}:fleet"
FLEET_MEMORY = "stoker:{cluster}:fleet:memory"
POLICY_MEMORY = "stoker:{cluster}:policy:memory"
PROVEN = "stoker:{cluster}:proven"

PERMANENT = {FUNCTIONS, HOSTS, WANTED, LEADER_FENCE, HOSTS_WANTED, FLEET_MEMORY, POLICY_MEMORY, PROVEN}
HOST_TTL_MS = 3_000
FAILING_TTL_MS = 120_000
FLEET_TTL_MS = 60_000
RECONNECT_S = 0.2

ACQUIRE = """
local holder = redis.call('GET', KEYS[1])
if holder == ARGV[1] then
  if redis.call('PTTL', KEYS[1]) < tonumber(ARGV[2]) then redis.call('PEXPIRE', KEYS[1], ARGV[2]) end
  return tonumber(redis.call('GET', KEYS[2]))
end
if holder then return 0 end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return redis.call('INCR', KEYS[2])
"""

RELEASE = "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end return 0"

CONFIRM = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] or redis.call('GET', KEYS[2]) ~= ARGV[2] then return 0 end
if redis.call('PTTL', KEYS[1]) < tonumber(ARGV[3]) then redis.call('PEXPIRE', KEYS[1], ARGV[3]) end
return 1
"""

WRITE_LED = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[2], ARGV[2])
redis.call('PUBLISH', KEYS[2], '')
return 1
"""


@dataclass(frozen=True, slots=True)
class Host:
    """A host agent's last report; `body` is the agent's own map (devices, replicas, progress)."""

    id: str
    body: dict[str, Any]


class Cluster:
    """Everything here is small, idempotent and safe to repeat."""

    def __init__(self, client: Redis) -> None:
        self._redis = client

    async def put_function(self, name: str, spec: dict[str, Any]) -> None:
        await self._redis.hset(FUNCTIONS, name, pack(spec))  # type: ignore[misc]
        await self.ring()

    async def replace_functions(self, put: dict[str, dict[str, Any]], delete: list[str]) -> None:
        """All of it in one step."""
        async with self._redis.pipeline(transaction=True) as pipe:
            for name, spec in put.items():
                pipe.hset(FUNCTIONS, name, pack(spec))
            if delete:
                pipe.hdel(FUNCTIONS, *delete)
            await pipe.execute()
        await self.ring()

    async def delete_function(self, name: str) -> bool:
        removed = bool(await self._redis.hdel(FUNCTIONS, name))  # type: ignore[misc]
        await self.ring()
        return removed

    async def function(self, name: str) -> dict[str, Any] | None:
        data: bytes | None = await self._redis.hget(FUNCTIONS, name)  # type: ignore[misc]
        return unpack(data) if data else None

    async def functions(self) -> dict[str, dict[str, Any]]:
        rows: dict[bytes, bytes] = await self._redis.hgetall(FUNCTIONS)  # type: ignore[misc]
        return {name.decode(): unpack(spec) for name, spec in sorted(rows.items())}

    async def report_host(self, host: str, body: dict[str, Any]) -> None:
        async with self._redis.pipeline(transaction=False) as pipe:
            pipe.sadd(HOSTS, host)
            pipe.set(HOST_PREFIX + host, pack(body), px=HOST_TTL_MS)
            await pipe.execute()

    async def forget_host(self, host: str) -> None:
        await self._redis.delete(HOST_PREFIX + host)
        await self.ring()

    async def hosts(self) -> dict[str, Host]:
        """Hosts that reported lately; the names of the others are forgotten."""
        members: Any = await self._redis.smembers(HOSTS)  # type: ignore[misc]
        names = sorted(name.decode() for name in members)
        bodies: list[Any] = await self._redis.mget([HOST_PREFIX + name for name in names]) if names else []
        found = dict(zip(names, bodies, strict=True))
        if silent := [name for name, body in found.items() if body is None]:
            await self._redis.srem(HOSTS, *silent)  # type: ignore[misc]
        return {name: Host(name, unpack(body)) for name, body in found.items() if body}

    async def wanted(self) -> dict[str, Any]:
        """Host id -> replica id -> replica record, as the controller last wrote it."""
        data: Any = await self._redis.get(WANTED)
        return unpack(data) if data else {}

    async def write_wanted(self, leader: str, wanted: dict[str, Any]) -> bool:
        """False, and nothing written, when `leader` no longer holds the lease."""
        return await self._write_led(leader, WANTED, wanted)

    async def _write_led(self, leader: str, key: str, value: Any) -> bool:
        return bool(await self._redis.eval(WRITE_LED, 2, LEADER, key, leader, pack(value)))  # type: ignore[misc]

    async def fleet_memory(self) -> dict[str, Any]:
        """What the provider of hosts must not forget when the controller restarts."""
        data: Any = await self._redis.get(FLEET_MEMORY)
        return unpack(data) if data else {}

    async def write_fleet_memory(self, leader: str, memory: dict[str, Any]) -> bool:
        """False, and nothing written, when `leader` no longer holds the lease."""
        return await self._write_led(leader, FLEET_MEMORY, memory)

    async def policy_memory(self) -> dict[str, Any]:
        """What the scaling policy had learned when it was last written."""
        data: Any = await self._redis.get(POLICY_MEMORY)
        return unpack(data) if data else {}

    async def write_policy_memory(self, leader: str, memory: dict[str, Any]) -> bool:
        """False, and nothing written, when `leader` no longer holds the lease."""
        return await self._write_led(leader, POLICY_MEMORY, memory)

    async def proven(self) -> dict[str, dict[str, Any]]:
        """By function, the spec of the version that was ready last."""
        data: Any = await self._redis.get(PROVEN)
        return unpack(data) if data else {}

    async def write_proven(self, leader: str, specs: dict[str, dict[str, Any]]) -> bool:
        """False, and nothing written, when `leader` no longer holds the lease."""
        return await self._write_led(leader, PROVEN, specs)

    async def report_fleet(self, report: dict[str, Any]) -> None:
        """Pools, their hosts, and why functions wait for them: for people and gateways; forgotten after a while."""
        await self._redis.set(FLEET, pack(report), px=FLEET_TTL_MS)

    async def fleet(self) -> dict[str, Any]:
        data: Any = await self._redis.get(FLEET)
        return unpack(data) if data else {}

    async def report_failing(self, failing: dict[str, Any]) -> None:
        """Functions whose workers keep failing to start, and when they are tried again; forgotten after a while."""
        await self._redis.set(FAILING, pack(failing), px=FAILING_TTL_MS)

    async def failing(self) -> dict[str, Any]:
        data: Any = await self._redis.get(FAILING)
        return unpack(data) if data else {}

    async def acquire_leadership(self, candidate: str, ttl_ms: int) -> int:
        """The fence (a positive number that rises with each new leader), or 0 when someone else leads. Also renews."""
        return int(await self._redis.eval(ACQUIRE, 2, LEADER, LEADER_FENCE, candidate, ttl_ms))  # type: ignore[misc]

    async def confirm_leadership(self, candidate: str, fence: int, ttl_ms: int) -> bool:
        """Whether `candidate` still leads under this fence; if so, its lease lasts at least `ttl_ms` from now on."""
        return bool(await self._redis.eval(CONFIRM, 2, LEADER, LEADER_FENCE, candidate, fence, ttl_ms))  # type: ignore[misc]

    async def release_leadership(self, candidate: str) -> None:
        await self._redis.eval(RELEASE, 1, LEADER, candidate)  # type: ignore[misc]

    async def want_hosts(self, hosts: list[str]) -> None:
        await self._redis.set(HOSTS_WANTED, pack(hosts))

    async def hosts_wanted(self) -> list[str] | None:
        data: Any = await self._redis.get(HOSTS_WANTED)
        return unpack(data) if data else None

    async def ring(self) -> None:
        """Wakes the controller now instead of at its next sweep."""
        await self._redis.publish(BELL, b"")


class Signal:
    """Wakes on any message of one channel (`BELL`, `WANTED`): a pub/sub connection that reconnects by itself.

    A message is only a hint to look; `wait` also returns on a timeout, and rings once after each reconnect.
    """

    def __init__(self, url: str, connect: Callable[[str], Redis], channel: str) -> None:
        self._url = url
        self._channel = channel
        self._connect = connect
        self._rung = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._task = asyncio.create_task(self._listen())

    async def close(self) -> None:
        if self._task:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def ring(self) -> None:
        self._rung.set()

    async def wait(self, timeout_s: float) -> bool:
        try:
            async with asyncio.timeout(timeout_s):
                await self._rung.wait()
        except TimeoutError:
            return False
        self._rung.clear()
        return True

    async def _listen(self) -> None:
        while True:
            client = self._connect(self._url)
            try:
                async with client.pubsub(ignore_subscribe_messages=True) as pubsub:
                    await pubsub.subscribe(self._channel)
                    self._rung.set()
                    while True:
                        if await pubsub.get_message(timeout=5.0):
                            self._rung.set()
            except RedisError:
                await asyncio.sleep(RECONNECT_S)
            finally:
                await client.aclose()
