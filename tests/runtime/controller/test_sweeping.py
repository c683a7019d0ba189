"""Sweeps go on whatever one of them finds, and say what they did."""

import asyncio
import logging
from contextlib import suppress

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError

from stoker.coldstart.failures import StoreUnavailable
from stoker.runtime.controller.sweeping import sweep_forever


async def test_a_sweep_that_fails_is_tried_again_when_the_next_is_due(caplog: pytest.LogCaptureFixture) -> None:
    outcomes = [StoreUnavailable("s3://bucket", None, "gone"), RedisConnectionError("no server"), 0, 3]
    over = asyncio.Event()

    async def sweep() -> int:
        outcome = outcomes.pop(0)
        if not outcomes:
            over.set()
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    with caplog.at_level(logging.INFO, "stoker.controller"):
        sweeping = asyncio.create_task(sweep_forever(sweep, "old things", 0, 0.001))
        await asyncio.wait_for(over.wait(), 30)
        await asyncio.sleep(0)
        sweeping.cancel()
        with suppress(asyncio.CancelledError):
            await sweeping
    said = [record.getMessage() for record in caplog.records]
    assert said[0].startswith("sweep of old things: ") and said[1] == "sweep of old things: no server"
    assert said[2:] == ["deleted 3 old things"]


async def test_the_first_sweep_waits_for_its_time() -> None:
    begun: list[float] = []
    now = asyncio.get_running_loop().time

    async def sweep() -> int:
        begun.append(now())
        return 0

    asked = now()
    sweeping = asyncio.create_task(sweep_forever(sweep, "old things", 0.2, 60))
    while not begun:
        await asyncio.sleep(0.01)
    sweeping.cancel()
    with suppress(asyncio.CancelledError):
        await sweeping
    assert begun[0] - asked >= 0.2
