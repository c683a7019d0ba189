"""One tenant's work waits behind its own, never in front of another's."""

import asyncio
import threading

import pytest

from stoker.runtime.gateway.lanes import Lanes


async def test_a_tenants_long_line_holds_up_nobody_else() -> None:
    lanes, go = Lanes(8, 2, "test"), threading.Event()
    at_once: list[int] = []
    busy = [0]

    def hold() -> None:
        busy[0] += 1
        at_once.append(busy[0])
        go.wait(20)
        busy[0] -= 1

    try:
        held = [asyncio.create_task(lanes.run("loud", hold)) for _ in range(20)]
        for _ in range(10):
            assert await asyncio.wait_for(lanes.run("quiet", int, "7"), 5) == 7
        assert at_once == [1, 2]
        go.set()
        await asyncio.gather(*held)
        assert len(at_once) == 20 and max(at_once) <= 3
    finally:
        go.set()
        lanes.close()


async def test_work_that_nobody_waits_for_keeps_its_place_until_it_has_ended() -> None:
    lanes, go, ran = Lanes(8, 2, "test"), threading.Event(), []
    try:
        left = [asyncio.create_task(lanes.run("loud", go.wait, 20)) for _ in range(2)]
        await asyncio.sleep(0.1)
        for task in left:
            task.cancel()
        waiting = asyncio.create_task(lanes.run("loud", ran.append, 1))
        await asyncio.sleep(0.2)
        assert not ran
        go.set()
        await asyncio.wait_for(waiting, 5)
        assert ran == [1]
    finally:
        go.set()
        lanes.close()


async def test_a_failure_and_a_client_that_leaves_while_it_waits_free_their_places() -> None:
    lanes, go = Lanes(8, 1, "test"), threading.Event()
    try:
        for _ in range(3):
            with pytest.raises(ZeroDivisionError):
                await lanes.run("t", divmod, 1, 0)
        holding = asyncio.create_task(lanes.run("t", go.wait, 20))
        gone = asyncio.create_task(lanes.run("t", int, "1"))
        await asyncio.sleep(0.05)
        gone.cancel()
        go.set()
        assert await holding
        assert await asyncio.wait_for(lanes.run("t", int, "2"), 5) == 2
    finally:
        go.set()
        lanes.close()
