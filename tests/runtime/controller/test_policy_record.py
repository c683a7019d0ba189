import math
from dataclasses import replace

import pytest

from stoker.queue.cluster import Cluster
from stoker.queue.records import pack, unpack
from stoker.runtime.controller.leader import Leadership
from stoker.runtime.controller.policy_memory import observe
from stoker.runtime.controller.policy_record import from_record, to_record
from stoker.runtime.controller.policy_state import Demand, Memory, Outlook, Rules

LEARNED = Outlook(at=50.0, fast=2.0, came=40.0, gaps=(900.0, 901.25), crests=(8,), loads=(15.5,), service_s=4.0)
MEMORY = Memory({"f": replace(LEARNED, credit_usd=0.25), "new": Outlook(at=50.0)}, boots={"gpu": (90.0,)})


async def test_what_was_learned_is_there_for_the_next_controller_on_its_own_clock(cluster: Cluster) -> None:
    leader = Leadership(cluster, "a")
    assert await leader.acquire()
    assert await cluster.write_policy_memory(leader.candidate, to_record(MEMORY, now=50.0, clock=1_000_050.0))
    assert not await cluster.write_policy_memory("another", {})
    known = from_record(await cluster.policy_memory(), now=7.0, clock=1_000_060.0)
    outlook = known.outlooks["f"]
    assert outlook.came == pytest.approx(7.0 - 20.0), "20 s ago on the wall clock"
    assert (outlook.gaps, outlook.crests, outlook.loads) == ((900.0, 901.25), (8,), (15.5,))
    assert (outlook.service_s, outlook.credit_usd, known.boots) == (4.0, 0.25, {"gpu": (90.0,)})
    assert math.isinf(known.outlooks["new"].came)


def test_rates_come_from_the_queue_and_the_budget_is_not_filled_up_by_a_restart() -> None:
    known = from_record(unpack(pack(to_record(MEMORY, 50.0, 50.0))), now=60.0, clock=60.0).outlooks["f"]
    seen = observe(known, Demand(arrived_per_s=0.5), 60.0, Rules(), seats=0)
    assert (seen.at, seen.fast, seen.steady, seen.slow) == (60.0, 0.5, 0.5, 0.5)
    assert seen.gaps == known.gaps and seen.credit_usd == 0.25
    later = observe(seen, Demand(arrived_per_s=0.5), 61.0, Rules(prewarm_usd_per_h=0.0), seats=0)
    assert later.credit_usd == 0.0


def test_no_record_is_an_empty_memory() -> None:
    assert from_record({}, 1.0, 2.0) == Memory()
