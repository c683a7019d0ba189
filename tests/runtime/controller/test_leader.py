"""The lease on a real server: who may begin a call, and until when."""

import asyncio
import time

import pytest

from stoker.queue.cluster import LEADER, LEADER_FENCE, Cluster
from stoker.runtime.controller.leader import BEGIN_S, LEASE_MS, Leadership, NotLeading


async def lease_ms(cluster: Cluster) -> int:
    return await cluster._redis.pttl(LEADER)


async def test_a_confirmed_lease_outlasts_the_call_and_is_not_shortened(cluster: Cluster) -> None:
    leader = Leadership(cluster, "a")
    assert await leader.acquire() and await lease_ms(cluster) <= LEASE_MS
    asked = time.monotonic()
    begin_by = await leader.confirm(20.0)
    assert asked + BEGIN_S <= begin_by <= time.monotonic() + BEGIN_S
    assert await lease_ms(cluster) > (20 + BEGIN_S) * 1000
    assert await leader.acquire() and await lease_ms(cluster) > (20 + BEGIN_S) * 1000


async def test_only_the_holder_of_the_present_term_may_act(cluster: Cluster) -> None:
    old, new = Leadership(cluster, "old"), Leadership(cluster, "new")
    with pytest.raises(NotLeading):
        await old.confirm(1)
    assert await old.acquire() and not await new.acquire()
    with pytest.raises(NotLeading):
        await new.confirm(1)
    await cluster._redis.delete(LEADER)
    assert await new.acquire() and new.fence > old.fence
    with pytest.raises(NotLeading):
        await old.confirm(1)
    assert not await old.acquire() and old.fence == 0


async def test_a_term_that_was_interrupted_is_over_for_its_holder_too(cluster: Cluster) -> None:
    leader = Leadership(cluster, "a")
    await leader.acquire()
    await cluster._redis.incr(LEADER_FENCE)
    with pytest.raises(NotLeading):
        await leader.confirm(1)


async def test_a_released_lease_is_free_at_once(cluster: Cluster) -> None:
    first, second = Leadership(cluster, "a"), Leadership(cluster, "b")
    await first.acquire()
    await first.confirm(30)
    await first.release()
    assert await second.acquire()
    await asyncio.sleep(0)
    await second.release()
