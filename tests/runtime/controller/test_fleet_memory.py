from dataclasses import replace

import pytest

from stoker.queue.records import pack, unpack
from stoker.runtime.controller.fleet_memory import (
    FIRST_PAUSE_S,
    LAUNCH_S,
    MAX_PAUSE_S,
    SETTLE_S,
    FleetMemory,
    PoolMemory,
    Sighting,
    judge,
    observe,
    refused,
)
from stoker.runtime.controller.groups import FailedLaunch, Group, Instance

NOW = 1_000_000.0
EMPTY = Group("g", "p", 0, 2, 1, zones=("a", "b"))


def with_hosts(*ids: str) -> Group:
    return replace(EMPTY, instances=tuple(Instance(id, "t3.micro", "a", "running") for id in ids))


def failed(zone: str, at: float = NOW) -> FailedLaunch:
    return FailedLaunch(f"{zone}{at}", at, f"not have sufficient g6e capacity in the Zone you requested ({zone}).")


def test_a_host_is_remembered_from_when_it_is_listed_and_when_it_reports() -> None:
    listed = observe(FleetMemory(), [with_hosts("i-1")], [], NOW)
    assert listed.machines == {"i-1": Sighting("p", NOW)}
    booted = observe(listed, [with_hosts("i-1")], ["i-1"], NOW + 90)
    assert booted.machines == {"i-1": Sighting("p", NOW, NOW + 90)}
    assert booted.pool("p").boots == (90.0,)
    assert observe(booted, [with_hosts("i-1")], ["i-1"], NOW + 95) == booted, "not written anew at every look"
    assert observe(booted, [with_hosts("i-1")], ["i-1"], NOW + 100).machines["i-1"].seen == NOW + 100
    assert observe(booted, [EMPTY], [], NOW + 300).machines == {}


def test_a_host_that_ends_before_it_reports_makes_its_pool_refuse() -> None:
    listed = observe(FleetMemory(), [with_hosts("i-1")], [], NOW)
    gone = observe(listed, [EMPTY], [], NOW + 5)
    assert gone.pool("p") == PoolMemory(1, 1, "host i-1 ended before it reported", NOW + 5 + FIRST_PAUSE_S)


def test_a_host_that_reports_ends_a_row_of_failures() -> None:
    memory = FleetMemory({"p": PoolMemory(3, 7, "no capacity", NOW + 50)})
    after = observe(memory, [with_hosts("i-1")], ["i-1"], NOW)
    assert after.pool("p") == PoolMemory(0, 7, boots=(0.0,))


def test_pauses_double_up_to_a_limit() -> None:
    pool, pauses = PoolMemory(), []
    for _ in range(8):
        pool = refused(pool, "no", NOW)
        pauses.append(pool.retry_at - NOW)
    assert pauses[:3] == [FIRST_PAUSE_S, 2 * FIRST_PAUSE_S, 4 * FIRST_PAUSE_S] and pauses[-1] == MAX_PAUSE_S


def asked(at: float) -> FleetMemory:
    return FleetMemory({"p": PoolMemory(asked_at=at)})


def test_a_pool_refuses_when_every_zone_failed() -> None:
    memory = judge(asked(NOW), EMPTY, [failed("a"), failed("b", NOW + 1)], NOW + 2)
    assert memory.pool("p").error == "no capacity for g6e in a, b"
    assert memory.pool("p").retry_at == NOW + 2 + FIRST_PAUSE_S
    again = replace(memory, pools={"p": replace(memory.pool("p"), asked_at=NOW + 40)})
    assert judge(again, EMPTY, [failed("a"), failed("b", NOW + 1)], NOW + 45) == again, "each failure counts once"
    assert judge(again, EMPTY, [failed("a", NOW + 41), failed("b", NOW + 42)], NOW + 45).pool("p").failures == 2


def test_a_group_may_try_its_other_zones_first() -> None:
    assert judge(asked(NOW), EMPTY, [failed("a")], NOW + 2) == asked(NOW)
    assert judge(asked(NOW), EMPTY, [failed("a")], NOW + SETTLE_S + 1).pool("p").failures == 1


def test_failures_of_long_ago_and_of_groups_that_have_their_hosts_do_not_count() -> None:
    old = [failed("a", NOW - 1000), failed("b", NOW - 1000)]
    assert judge(asked(NOW), EMPTY, old, NOW + 20) == asked(NOW)
    new = [failed("a", NOW), failed("b", NOW)]
    assert judge(asked(NOW), with_hosts("i-1"), new, NOW + 20) == asked(NOW)


def test_a_group_that_starts_nothing_and_says_nothing_is_given_up() -> None:
    assert judge(asked(NOW), EMPTY, [], NOW + LAUNCH_S - 1) == asked(NOW)
    late = judge(asked(NOW), EMPTY, [], NOW + LAUNCH_S + 1)
    assert late.pool("p").error == "no instance was started in 180 s"
    assert judge(FleetMemory(), EMPTY, [], NOW) == FleetMemory(), "what this cluster did not ask for"


@pytest.mark.parametrize(
    "memory", [FleetMemory(), FleetMemory({"p": PoolMemory(1, 2, "x", 3.0, boots=(4.0,))}, {"i": Sighting("p", 1.0)})]
)
def test_the_memory_survives_being_stored(memory: FleetMemory) -> None:
    assert FleetMemory.from_dict(unpack(pack(memory.to_dict()))) == memory
