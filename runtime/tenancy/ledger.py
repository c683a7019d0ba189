"""Usage records become bills: the queue writes one record with each job's end, the ledger enters each into its tenant's
books exactly once, and keeps them as JSON lines in the object store.

Every step may be repeated: a tenant's books remember the last record entered of each function, and the lines of one
stretch of records always have the same name. So it doesn't matter how many ledgers run, or where one is killed.
"""

import asyncio
import json
import logging
from collections.abc import Iterable, Sequence
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from redis.asyncio import Redis
from redis.exceptions import RedisError

from stoker.coldstart.failures import ColdStartError
from stoker.coldstart.store import ObjectStore
from stoker.queue import keys
from stoker.queue.records import pack, unpack
from stoker.runtime.spec import adapted_name
from stoker.runtime.tenancy.admission import places, spent
from stoker.runtime.tenancy.billing_days import day_of, month_of_day
from stoker.runtime.tenancy.directory import Directory
from stoker.runtime.tenancy.price import FREE, Price, Quantities, amount
from stoker.runtime.tenancy.price_history import PriceHistory, place

BOOK = Path(__file__).with_name("book.lua").read_text()
BOOKS_TTL_MS = 400 * 86_400_000
BATCH = 2000
ENTERED, EXPORTED, PRICED = (f"stoker:{{ledger}}:{what}" for what in ("entered", "exported", "priced"))
PERMANENT = frozenset({ENTERED, EXPORTED, PRICED})
TOKENS = ("prompt_tokens", "cached_tokens", "completion_tokens")
DEVICE = ("prefill_us", "decode_us", "swap_us")
METRICS = ("jobs", "failed", "run_us", "cold_us", *DEVICE, *TOKENS, "micro_usd")
COLLECT_S, EXPORT_S = 0.5, 60.0
DAY_MS = 86_400_000

Row = tuple[str, dict[bytes, bytes]]

log = logging.getLogger("stoker.ledger")


class Entry(NamedTuple):
    """One job's usage with its price, frozen when it was entered. `id` orders a function's entries. Of a model's jobs
    `run_us` is what the device computed for them: `prefill_us` and `decode_us`. `swap_us` is the time in which
    it did nothing but bring the model's weights for them. `adapter` is the model's that answered, if it had one."""

    id: str
    job: str
    tenant: str
    function: str
    state: str
    attempt: int
    run_us: int
    cold_us: int
    prefill_us: int
    decode_us: int
    swap_us: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    micro_usd: int
    jobs: int = 1
    adapter: str = ""

    @property
    def day(self) -> str:
        return day_of(place(self.id)[0] / 1000)

    @property
    def failed(self) -> int:
        return self.jobs if self.state != "succeeded" else 0


def entry_of(function: str, id: str, fields: dict[bytes, bytes], price: Price) -> Entry:
    """What failed is on record and costs nothing; what was stopped costs what it used until then, which comes in a
    record of its own that doesn't count as a job."""
    usage: dict[str, Any] = unpack(fields[b"usage"]) if fields[b"usage"] else {}
    state, late = fields[b"state"].decode(), b"late" in fields
    run_us = round((usage.get("busy_ms") or 0) * 1000)
    tokens = [int(usage.get(name) or 0) for name in TOKENS]
    charged = price != FREE and (late or state == "succeeded")
    return Entry(
        id,
        fields[b"job"].decode(),
        fields[b"tenant"].decode(),
        function,
        state,
        int(fields[b"attempt"]),
        run_us,
        round((usage.get("start_ms") or 0) * 1000),
        *[int(usage.get(name) or 0) for name in DEVICE],
        *tokens,
        micro_usd=amount(price, Quantities(1, run_us, *tokens)) if charged else 0,
        jobs=0 if late else 1,
        adapter=usage.get("adapter") or "",
    )


def by_book(entries: Iterable[Entry]) -> dict[tuple[str, str, str], list[Entry]]:
    """(tenant, day, adapter) -> its entries, those of each tenant in order."""
    books: dict[tuple[str, str, str], list[Entry]] = {}
    for day_number, of_day in groupby(entries, lambda entry: place(entry.id)[0] // DAY_MS):
        day = day_of(day_number * DAY_MS / 1000)
        for entry in of_day:
            books.setdefault((entry.tenant, day, entry.adapter), []).append(entry)
    return books


def sums(entries: Sequence[Entry]) -> list[int]:
    """One for each of METRICS."""
    return [sum(map(attrgetter(name), entries)) for name in METRICS]


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
                after = await self._enter(function, rows)
                total += len(rows)
                if len(rows) < BATCH:
                    break
        return total

    async def _enter(self, function: str, rows: list[Row]) -> str:
        """The id of the last one."""
        price = await self._directory.price(function)
        entries = [entry_of(function, id, fields, price) for id, fields in rows]
        await self._note(function, entries[0].id, price)
        for (tenant, day, adapter), own in by_book(entries).items():
            await self._enter_in(tenant, day, adapted_name(function, adapter), own)
        if costs := [entry.micro_usd for entry in entries if entry.state == "succeeded"]:
            await self._directory.note_costs(function, costs)
        await self._redis.hset(ENTERED, function, entries[-1].id)
        return entries[-1].id

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

    async def _rows(self, function: str, after: str, until: str = "+") -> list[Row]:
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

    async def _enter_in(self, tenant: str, day: str, model: str, entries: list[Entry]) -> None:
        """A function with an adapter has books of its own. Where another ledger has entered some of them meanwhile, the
        sums are made anew, of the rest."""
        book = [cursors_key(tenant), *places(tenant), day_key(tenant, day), spent(tenant, month_of_day(day))]
        while entries:
            between = [entries[0].id, entries[-1].id]
            arguments = [model, BOOKS_TTL_MS, *between, len(METRICS), *METRICS, *sums(entries)]
            last = await self._book(keys=book, args=[*arguments, *(entry.job for entry in entries)])
            entries = behind(entries, last.decode())

    async def daily(self, tenant: str, days: Iterable[str]) -> dict[tuple[str, str], dict[str, int]]:
        """(day, function or function:adapter) -> metrics, from the tenant's books."""
        found: dict[tuple[str, str], dict[str, int]] = {}
        for day in days:
            rows = await self._redis.hgetall(day_key(tenant, day))
            for field, value in sorted(rows.items()):
                function, _, metric = field.decode().rpartition("|")
                found.setdefault((day, function), dict.fromkeys(METRICS, 0))[metric] = int(value)
        return found


def behind(entries: list[Entry], id: str) -> list[Entry]:
    return [] if entries[-1].id == id else [entry for entry in entries if place(entry.id) > place(id)]


def day_key(tenant: str, day: str) -> str:
    return f"stoker:t:{{{tenant}}}:d:{day}"


def cursors_key(tenant: str) -> str:
    return f"stoker:t:{{{tenant}}}:entered"


def object_key(first: Entry) -> str:
    return f"usage/{first.day}/{first.function}/{first.id}.jsonl"


def lines(entries: Iterable[Entry]) -> bytes:
    return b"".join(json.dumps(entry._asdict(), separators=(",", ":")).encode() + b"\n" for entry in entries)
