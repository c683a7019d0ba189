"""The cluster's shared memory: deployed functions, host reports, wanted replicas, the fleet of hosts, the controller's
lease and its bell.

Values are msgpack maps that the queue doesn't interpret. Only the controller's lease holder writes wanted replicas.
"""

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from redis.asyncio import Redis
from redis.asyncio.client import Pipeline
from redis.exceptions import RedisError, WatchError

from stoker.queue.records import pack, unpack
from stoker.queue.subscriber import Subscriber

Records = dict[str, dict[str, Any]]

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
APPS = "stoker:{cluster}:apps"
STARTS = "stoker:{cluster}:starts"
ERA = "stoker:{cluster}:era"
RELEASES_PREFIX = "stoker:{cluster}:releases:"

PERMANENT = {FUNCTIONS, HOSTS, WANTED, LEADER_FENCE, HOSTS_WANTED, FLEET_MEMORY, POLICY_MEMORY, PROVEN, APPS, ERA}
HOST_TTL_MS = 3_000
FAILING_TTL_MS = 120_000
FLEET_TTL_MS = 60_000
STARTS_TTL_MS = 3_600_000
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


@dataclass(frozen=True, slots=True)
class Change:
    """Of deployed functions (`put`, `delete`) and of what is kept of an app's versions (`releases`, `dropped`)."""

    put: Records
    delete: list[str] = field(default_factory=list)
    releases: Records = field(default_factory=dict)
    dropped: list[str] = field(default_factory=list)


def records_in(rows: dict[bytes, bytes]) -> Records:
    return {name.decode(): unpack(record) for name, record in sorted(rows.items())}


def write_change(pipe: Pipeline, app: str, change: Change) -> None:
    if change.releases:
        pipe.sadd(APPS, app)
        pipe.hset(RELEASES_PREFIX + app, mapping={version: pack(kept) for version, kept in change.releases.items()})
        pipe.persist(RELEASES_PREFIX + app)
    if change.dropped:
        pipe.hdel(RELEASES_PREFIX + app, *change.dropped)
    if change.put:
        pipe.hset(FUNCTIONS, mapping={name: pack(spec) for name, spec in change.put.items()})
    if change.delete:
        pipe.hdel(FUNCTIONS, *change.delete)


class Cluster:
    """Everything here is small, idempotent and safe to repeat."""

    def __init__(self, client: Redis) -> None:
        self._redis = client

    async def put_function(self, name: str, spec: dict[str, Any]) -> None:
        await self._redis.hset(FUNCTIONS, name, pack(spec))  # type: ignore[misc]
        await self.ring()

    async def change_functions(self, app: str, decide: Callable[[Records, Records], Change]) -> None:
        """In one step. `decide` is told the deployed functions by full name and what is kept of the app's versions, and
        is asked again with what is there then, should either change before its own change is made."""
        async with self._redis.pipeline(transaction=True) as pipe:
            while True:
                with contextlib.suppress(WatchError):
                    await pipe.watch(FUNCTIONS, RELEASES_PREFIX + app)
                    change = decide(records_in(await pipe.hgetall(FUNCTIONS)), await self._releases(pipe, app))  # type: ignore[misc]
                    pipe.multi()
                    write_change(pipe, app, change)
                    await pipe.execute()
                    break
        await self.ring()

    async def releases(self, app: str) -> Records:
        """What is kept of an app's versions, by version."""
        return await self._releases(self._redis, app)

    async def _releases(self, client: Redis, app: str) -> Records:
        return records_in(await client.hgetall(RELEASES_PREFIX + app))  # type: ignore[misc]

    async def apps(self) -> list[str]:
        """Those of which versions are kept."""
        members: Any = await self._redis.smembers(APPS)  # type: ignore[misc]
        return sorted(name.decode() for name in members)

    async def forget_apps(self, apps: list[str]) -> None:
        """With all of their versions."""
        if apps:
            await self._redis.delete(*(RELEASES_PREFIX + app for app in apps))
            await self._redis.srem(APPS, *apps)  # type: ignore[misc]

    async def let_releases_go(self, app: str, after_ms: int) -> None:
        """Unless it is deployed again until then. An app without any is forgotten."""
        if not await self._redis.exists(RELEASES_PREFIX + app):
            await self._redis.srem(APPS, app)  # type: ignore[misc]
        elif await self._redis.pttl(RELEASES_PREFIX + app) < 0:
            await self._redis.pexpire(RELEASES_PREFIX + app, after_ms)

    async def delete_function(self, name: str) -> bool:
        removed = bool(await self._redis.hdel(FUNCTIONS, name))  # type: ignore[misc]
        await self.ring()
        return removed

    async def function(self, name: str) -> dict[str, Any] | None:
        data: bytes | None = await self._redis.hget(FUNCTIONS, name)  # type: ignore[misc]
        return unpack(data) if data else None

    async def functions(self) -> dict[str, dict[str, Any]]:
        return records_in(await self._redis.hgetall(FUNCTIONS))  # type: ignore[misc]

    async def era(self) -> int:
        """What was kept of tenants' prompts in an earlier era is of a tenant that may be gone."""
        return int(await self._redis.get(ERA) or 0)

    async def end_era(self) -> None:
        await self._redis.incr(ERA)

    async def report_host(self, host: str, body: dict[str, Any]) -> None:
        named: Any = self._redis.sadd(HOSTS, host)
        await asyncio.gather(named, self._redis.set(HOST_PREFIX + host, pack(body), px=HOST_TTL_MS))

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

    async def ask_start(self, function: str) -> None:
        """Someone wants to know whether it starts; remembered for a while."""
        now_ms = await self._now_ms()
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.zremrangebyscore(STARTS, "-inf", now_ms - STARTS_TTL_MS)
            pipe.zadd(STARTS, {function: now_ms})
            pipe.pexpire(STARTS, STARTS_TTL_MS)
            await pipe.execute()
        await self.ring()

    async def asked_starts(self) -> dict[str, float]:
        """Function -> seconds since its start was asked for last."""
        rows: Any = await self._redis.zrange(STARTS, 0, -1, withscores=True)
        now_ms = await self._now_ms() if rows else 0
        return {name.decode(): max(0.0, (now_ms - asked_ms) / 1000) for name, asked_ms in rows}

    async def _now_ms(self) -> int:
        """By the server's clock."""
        seconds, micros = await self._redis.time()  # type: ignore[misc]
        return seconds * 1000 + micros // 1000

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

    async def ring(self, function: str = "") -> None:
        """Wakes the controller now instead of at its next sweep; for a function's first job, unless it is served."""
        await self._redis.publish(BELL, function)


class Signal:
    """Wakes on any message of one channel (`BELL`, `WANTED`): a subscription that comes back by itself.

    A message is only a hint to look; `wait` also returns on a timeout, and each (re)connect counts as an empty message.
    Messages that `matters` denies are not heard.
    """

    def __init__(
        self,
        url: str,
        channel: str,
        matters: Callable[[bytes], bool] = lambda message: True,
    ) -> None:
        self._channel = channel
        self._matters = matters
        self._rung = asyncio.Event()
        self._subscriber = Subscriber(url, self._on_message, self._on_ready)
        self._starting: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Also before the server."""
        self._starting = asyncio.create_task(self._subscribe())

    async def close(self) -> None:
        if self._starting:
            self._starting.cancel()
            await asyncio.gather(self._starting, return_exceptions=True)
        await self._subscriber.close()

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

    async def _subscribe(self) -> None:
        while True:
            try:
                return await self._subscriber.start(self._channel)
            except (RedisError, OSError):
                await asyncio.sleep(RECONNECT_S)

    def _on_message(self, channel: str, message: bytes) -> None:
        if self._matters(message):
            self._rung.set()

    def _on_ready(self, channel: str) -> None:
        self._on_message(channel, b"")
