"""What the policy has learned, as a record that outlives its controller: idle times, start and service times. Rates are
not in it: they are old by the time another controller reads them. Pure functions; a few hundred bytes per function."""

import math
from collections.abc import Mapping
from typing import Any

from stoker.runtime.controller.policy_state import Memory, Outlook

LEARNED = ("gaps", "crests", "loads", "service_s", "full_s", "credit_usd")


def to_record(memory: Memory, now: float, clock: float) -> dict[str, Any]:
    """`clock` is the wall clock (Unix seconds) at `now`."""
    outlooks = {name: outlook_record(outlook, clock - now) for name, outlook in memory.outlooks.items()}
    return {"outlooks": outlooks, "boots": {pool: rounded(times) for pool, times in memory.boots.items()}}


def from_record(record: Mapping[str, Any], now: float, clock: float) -> Memory:
    """The memory of a controller that has seen nothing yet itself. An empty record gives an empty one."""
    outlooks = {name: outlook_of(known, now - clock) for name, known in record.get("outlooks", {}).items()}
    return Memory(outlooks, boots={pool: tuple(times) for pool, times in record.get("boots", {}).items()})


def outlook_record(outlook: Outlook, shift: float) -> dict[str, Any]:
    came = None if math.isinf(outlook.came) else round(outlook.came + shift, 1)
    return {"came": came} | {name: rounded(getattr(outlook, name)) for name in LEARNED}


def outlook_of(record: Mapping[str, Any], shift: float) -> Outlook:
    learned: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in record.items()
    }
    came = learned.pop("came")
    return Outlook(came=-math.inf if came is None else came + shift, **learned)


def rounded(value: Any) -> Any:
    return [round(each, 2) for each in value] if isinstance(value, tuple) else round(value, 4)
