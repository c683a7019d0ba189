"""Who is to be told how jobs ended: deliveries that wait in Redis until somebody has made them, at least once each.

The script that ends a job writes its delivery, so none is lost. Whoever takes one has it for a lease.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from redis.asyncio import Redis

from stoker.queue import keys
from stoker.queue.records import JobState, function_of, pack, unpack
from stoker.queue.replies import fields
from stoker.queue.scripts import Scripts

Status = Literal["pending", "delivered", "failed", "disabled"]


@dataclass(frozen=True, slots=True)
class Delivery:
    """One end of a job that its `url` is to be told of.

    `tries` counts since it was last asked for; `body` is what was sent, kept while it may be sent again. `lease` is ""
    unless it was taken."""

    id: str
    url: str
    tenant: str
    state: JobState
    ended_ms: int
    status: Status
    tries: int
    body: bytes
    lease: str = ""

    @property
    def job_id(self) -> str:
        return self.id.rpartition(".")[0]


@dataclass(frozen=True, slots=True)
class Try:
    """`status` is the HTTP answer's, 0 when there was none and `error` says why."""

    at: float
    seconds: float
    status: int
    error: str


class Deliveries:
    """Everything here is one round trip and safe to repeat."""

    def __init__(self, client: Redis) -> None:
        self._redis: Any = client
        self._scripts = Scripts(client)

    async def functions(self) -> list[str]:
        """All that may have deliveries, those that were deleted lately too."""
        living = await self._redis.smembers(keys.FUNCTIONS)
        deleted = await self._redis.zrangebyscore(keys.DELETED, time.time() - keys.DELIVERY_KEPT_S, "+inf")
        return sorted({name.decode() for name in (*living, *deleted)})

    async def take(self, functions: Sequence[str], most: int, lease_ms: int) -> list[Delivery]:
        """Up to `most` of each function's that are due, the ones that waited longest first."""
        if not functions:
            return []
        replies = await self._scripts.run_each("due", functions, [most, lease_ms])
        return [delivery_of(id.decode(), row, lease.decode()) for reply in replies for id, lease, row in reply]

    async def tried(
        self, delivery: Delivery, what: Try | None, status: Status, pause_s: float | None, body: bytes
    ) -> bool:
        """Logs a try, if there was one; None for `pause_s` means that there will be no other. False when somebody else
        has the delivery by now."""
        entry = pack([what.at, what.seconds, what.status, what.error]) if what else b""
        pause = "" if pause_s is None else round(pause_s * 1000)
        arguments = [delivery.id, delivery.lease, entry, status, pause, body]
        return bool(await self._scripts.run("tried", function_of(delivery.job_id), arguments))

    async def again(self, delivery_id: str) -> bool:
        """Makes it due now, with all of its tries. False for one that is no longer kept."""
        return bool(await self._scripts.run("redeliver", function_of(delivery_id.rpartition(".")[0]), [delivery_id]))

    async def of_job(self, job_id: str, lives: int) -> list[tuple[Delivery, list[Try]]]:
        """What is kept of the job's, the first of its `lives` first."""
        function = function_of(job_id)
        found = []
        for life in range(lives):
            id = f"{job_id}.{life}"
            row = await self._redis.hgetall(keys.key(function, f"w:{id}"))
            if row:
                tries = await self._redis.lrange(keys.key(function, f"wl:{id}"), 0, -1)
                found.append((delivery_of(id, row), [Try(*unpack(entry)) for entry in tries]))
        return found


def delivery_of(id: str, row: Any, lease: str = "") -> Delivery:
    values = {name.decode(): value for name, value in fields(row).items()}
    return Delivery(
        id=id,
        url=values["url"].decode(),
        tenant=values["tenant"].decode(),
        state=JobState(values["state"].decode()),
        ended_ms=int(values["ended"]),
        status=values["status"].decode(),  # type: ignore[arg-type]
        tries=int(values["tries"]),
        body=values.get("body", b""),
        lease=lease,
    )
