"""Usage records become bills: the queue writes one record with each job's end, the ledger enters each into its tenant's
books exactly once, and keeps them as JSON lines in the object store.

Every step may be repeated: a tenant's books remember the last record entered of each function, and the lines of one
stretch of records always have the same name. So it doesn't matter how many ledgers run, or where one is killed.
"""

import asyncio
import json
import logging
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import RedisError

from stoker.coldstart.failures import ColdStartError
from stoker.coldstart.store import ObjectStore
from stoker.queue import keys
from stoker.queue.records import pack, unpack
from stoker.runtime.tenancy.admission import places, spent
from stoker.runtime.tenancy.billing_days import day_of, month_of
from stoker.runtime.tenancy.directory import Directory
from stoker.runtime.tenancy.price import Price, Quantities, amount
from stoker.runtime.tenancy.price_history import PriceHistory

BOOK = Path(__file__).with_name("book.lua").read_text()
BOOKS_TTL_MS = 400 * 86_400_000
BATCH = 1000
ENTERED, EXPORTED, PRICED = (f"stoker:{{ledger}}:{what}" for what in ("entered", "exported", "priced"))
PERMANENT = frozenset({ENTERED, EXPORTED, PRICED})
METRICS = ("jobs", "failed", "run_us", "cold_us", "prompt_tokens", "cached_tokens", "completion_tokens", "micro_usd")
COLLECT_S, EXPORT_S = 0.5, 60.0

log = logging.getLogger("stoker.ledger")


@dataclass(frozen=True, slots=True)
class Entry:
    """One job's usage with its price, frozen when it was entered. `id` orders a function's entries."""

    id: str
    job: str
    tenant: str
    function: str
    state: str
    attempt: int
    run_us: int
    cold_us: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    micro_usd: int
    jobs: int = 1

    @property
    def seconds(self) -> float:
        return int(self.id.partition("-")[0]) / 1000

    def numbers(self) -> list[int]:
        own = asdict(self) | {"failed": self.jobs if self.state != "succeeded" else 0}
        return [own[name] for name in METRICS]


def entry_of(function: str, id: str, fields: dict[bytes, bytes], price: Price) -> Entry:
    """What failed is on record and costs nothing; what was stopped costs what it used until then, which comes in a
    record of its own that doesn't count as a job."""
    text = {name.decode(): value for name, value in fields.items()}
    usage: dict[str, Any] = unpack(text["usage"]) if text["usage"] else {}
    state = text["state"].decode()
    tokens = {name: int(usage.get(name) or 0) for name in ("prompt_tokens", "cached_tokens", "completion_tokens")}
    late, run_us = "late" in text, round((usage.get("busy_ms") or 0) * 1000)
    used = Quantities(1, run_us, **tokens)
    return Entry(
        id=id,
        job=text["job"].decode(),
        tenant=text["tenant"].decode(),
        function=function,
        state=state,
        attempt=int(text["attempt"]),
        run_us=run_us,
        cold_us=round((usage.get("start_ms") or 0) * 1000),
        **tokens,
        micro_usd=amount(price, used) if late or state == "succeeded" else 0,
        jobs=0 if late else 1,
    )


class Ledger:
    def __init__(self, client: Redis, directory: Directory, store: ObjectStore) -> None:
        self._redis: Any = client
        self._book: Any = client.register_script(BOOK)
        self._directory = directory
        self._store = store

    async def run(self) -> None:
        """Until cancelled. An outage is waited out: the records stay where they are."""
        loop = asyncio.get_running_loop()
        export_at = loop.time() + EXPORT_S
        while True:
            try:
                await self.collect()
                if loop.time() >= export_at:
                    export_at = loop.time() + EXPORT_S
                    await self.export()
            except (RedisError, OSError, TimeoutError, ColdStartError) as error:
                log.warning("usage stays uncollected for now: %s", error)
            await asyncio.sleep(COLLECT_S)

    async def expect(self, function: str) -> None:
        """Before a function is deleted: its last records are entered, even if none of it ever was."""
        await self._redis.hsetnx(ENTERED, function, "0-0")

    async def collect(self) -> int:
        """Enters what was recorded since; returns how many records were read."""
        total = 0
        for function, after in (await self._cursors(ENTERED)).items():
            while rows := await self._rows(function, after):
                price = await self._directory.price(function)
                entries = [entry_of(function, id, fields, price) for id, fields in rows]
                await self._note(function, entries[0].id, price)
                await self._enter(function, entries)
                if costs := [entry.micro_usd for entry in entries if entry.state == "succeeded"]:
                    await self._directory.note_costs(function, costs)
                after = entries[-1].id
                await self._redis.hset(ENTERED, function, after)
                total += len(entries)
        return total

    async def export(self) -> int:
        """Writes what was entered since as JSON lines; returns how many."""
        total, entered = 0, await self._redis.hgetall(ENTERED)
        for function, after in (await self._cursors(EXPORTED)).items():
            until = entered.get(function.encode(), b"0-0").decode()
            history = await self._history(function)
            while rows := await self._rows(function, after, until):
                price = await self._directory.price(function)
                entries = [entry_of(function, id, fields, history.at(id) or price) for id, fields in rows]
                await asyncio.to_thread(self._store.write, object_key(entries[0]), lines(entries))
                after = entries[-1].id
                await self._redis.hset(EXPORTED, function, after)
                await self._keep(function, (await self._history(function)).behind(after))
                total += len(entries)
        return total

    async def _cursors(self, which: str) -> dict[str, str]:
        """The last record seen of every function that has any, deleted ones included as long as theirs are kept."""
        known = {name.decode(): place.decode() for name, place in (await self._redis.hgetall(which)).items()}
        living = [name.decode() for name in await self._redis.smembers(keys.FUNCTIONS)]
        return {name: known.get(name, "0-0") for name in sorted({*known, *living})}

    async def _rows(self, function: str, after: str, until: str = "+") -> list[tuple[str, dict[bytes, bytes]]]:
        rows = await self._redis.xrange(keys.key(function, "use"), f"({after}", until, count=BATCH)
        return [(id.decode(), fields) for id, fields in rows]

    async def _history(self, function: str) -> PriceHistory:
        data = await self._redis.hget(PRICED, function)
        return PriceHistory.from_list(unpack(data)) if data else PriceHistory()

    async def _note(self, function: str, id: str, price: Price) -> None:
        """Before entries are entered at a price, for whoever exports them."""
        history = await self._history(function)
        if (after := history.noted(id, price)) is not history:
            await self._keep(function, after)

    async def _keep(self, function: str, history: PriceHistory) -> None:
        await self._redis.hset(PRICED, function, pack(history.to_list()))

    async def _enter(self, function: str, entries: list[Entry]) -> None:
        by_tenant: defaultdict[str, list[Entry]] = defaultdict(list)
        for entry in entries:
            by_tenant[entry.tenant].append(entry)
        for tenant, own in by_tenant.items():
            arguments: list[Any] = [function, BOOKS_TTL_MS, len(METRICS), *METRICS]
            for entry in own:
                month = spent(tenant, month_of(entry.seconds))
                arguments += [entry.id, entry.job, day_key(tenant, day_of(entry.seconds)), month, *entry.numbers()]
            await self._book(keys=[cursors_key(tenant), *places(tenant)], args=arguments)

    async def daily(self, tenant: str, days: Iterable[str]) -> dict[tuple[str, str], dict[str, int]]:
        """(day, function) -> metrics, from the tenant's books."""
        found: dict[tuple[str, str], dict[str, int]] = {}
        for day in days:
            rows = await self._redis.hgetall(day_key(tenant, day))
            for field, value in sorted(rows.items()):
                function, _, metric = field.decode().rpartition("|")
                found.setdefault((day, function), dict.fromkeys(METRICS, 0))[metric] = int(value)
        return found


def day_key(tenant: str, day: str) -> str:
    return f"stoker:t:{{{tenant}}}:d:{day}"


def cursors_key(tenant: str) -> str:
    return f"stoker:t:{{{tenant}}}:entered"


def object_key(first: Entry) -> str:
    return f"usage/{day_of(first.seconds)}/{first.function}/{first.id}.jsonl"


def lines(entries: Iterable[Entry]) -> bytes:
    return b"".join(json.dumps(asdict(entry), separators=(",", ":")).encode() + b"\n" for entry in entries)
