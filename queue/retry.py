"""Repeats a call that is safe to repeat until the server is back."""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ReadOnlyError
from redis.exceptions import TimeoutError as RedisTimeoutError

T = TypeVar("T")

# READONLY: the client still talks to a primary that was just demoted.
AWAY = (RedisConnectionError, RedisTimeoutError, ReadOnlyError)

BASE_S = 0.02
CAP_S = 1.0


def full_jitter(attempt: int, cap: float = CAP_S) -> float:
    """Seconds before retry `attempt` (0-based): uniform in [0, min(cap, BASE_S * 2^attempt)].

    Source: M. Brooker, "Exponential Backoff And Jitter", AWS Architecture Blog, 2015.
    """
    return random.uniform(0, min(cap, BASE_S * 2 ** min(attempt, 32)))


async def insist(call: Callable[[], Awaitable[T]], deadline_s: float, begun: Awaitable[T] | None = None) -> T:
    """Repeats `call` while the server is away; after `deadline_s` seconds its last error is raised. `begun`: the first
    call, made already."""
    give_up = time.monotonic() + deadline_s
    attempt = 0
    while True:
        try:
            return await (begun or call())
        except AWAY:
            begun = None
            pause = full_jitter(attempt)
            if time.monotonic() + pause >= give_up:
                raise
        attempt += 1
        await asyncio.sleep(pause)
