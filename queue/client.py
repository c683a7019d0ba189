"""The connection to Redis or Valkey: explicit timeouts, and no write that the library sends twice by itself."""

from typing import Any

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from stoker.queue.connection import CLASSES
from stoker.queue.iam_auth import separate
from stoker.queue.pipeline import PipelinedRedis

SOCKET_TIMEOUT_S = 10.0
CONNECT_TIMEOUT_S = 5.0
MAX_CONNECTIONS = 64
MIN_VERSION = (7, 0)


class ServerUnfit(RuntimeError):
    """The server would lose or refuse jobs; the message says what to change."""


def connect(url: str, *, socket_timeout_s: float = SOCKET_TIMEOUT_S, max_connections: int = MAX_CONNECTIONS) -> Redis:
    """A client for `redis://`, `rediss://` or `unix://`. Replies are bytes. `rediss://USER@HOST:PORT?iam=CACHE` logs in
    to an ElastiCache Serverless cache with the AWS identity at hand.

    redis-py re-sends a command up to ten times when its reply is lost; here a lost reply raises, and the caller repeats
    what is safe to repeat (see `stoker.queue.retry`).
    """
    scheme, mark, _ = url.partition("://")
    if not mark or scheme not in CLASSES:
        raise ValueError(f"{url!r} is no server: use redis://host:port, rediss://host:port or unix:///path")
    url, credentials = separate(url)
    pool = BlockingConnectionPool.from_url(
        url,
        max_connections=max_connections,
        timeout=socket_timeout_s,
        socket_timeout=socket_timeout_s,
        socket_connect_timeout=CONNECT_TIMEOUT_S,
        retry=Retry(NoBackoff(), 0),
        protocol=2,
        **({} if scheme == "unix" else {"socket_keepalive": True}),
        **({"credential_provider": credentials} if credentials else {}),
    )
    pool.connection_class = CLASSES[scheme]
    return PipelinedRedis.from_pool(pool)


async def check_server(client: Redis) -> None:
    """Raises ServerUnfit for a server older than 7.0 or one that may evict live jobs."""
    reason = unfitness(await client.info())
    if reason:
        raise ServerUnfit(reason)


def unfitness(info: dict[str, Any]) -> str:
    """Why the server described by INFO can't be used, or ""."""
    version = str(info.get("redis_version", "0"))
    if tuple(int(part) for part in version.split(".")[:2]) < MIN_VERSION:
        return f"the server speaks Redis {version}; stoker needs Redis 7.0 or later, or any Valkey"
    # A volatile policy (ElastiCache Serverless has no other) takes only keys with a TTL: those of ended jobs.
    policy = info.get("maxmemory_policy", "noeviction")
    if policy != "noeviction" and not policy.startswith("volatile-"):
        return f"maxmemory-policy is {policy}, which may evict jobs: run CONFIG SET maxmemory-policy noeviction"
    return ""
