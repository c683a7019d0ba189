import asyncio
from collections.abc import Awaitable, Callable

import pytest
from redis.asyncio import Redis

from stoker.queue.records import pack, unpack
from stoker.runtime.tenancy import audit
from stoker.runtime.tenancy.audit import ENTRIES, HEAD, MOST, AuditLog, Entry, Head

SECRET = "the secret of this deployment"


async def noted(log: AuditLog, count: int) -> None:
    for number in range(count):
        await log.note("acme", "key1", "PUT /v1/functions/{name}", {"name": f"f{number}"}, 201)


async def test_entries_are_read_as_they_were_noted(redis: Redis) -> None:
    log = AuditLog(redis, SECRET)
    assert await log.read(10) == ([], 0)
    await noted(log, 3)
    entries, broken = await log.read(2)
    assert broken == 0
    assert [(entry.number, entry.target, entry.status) for entry in entries] == [
        (3, {"name": "f2"}, 201),
        (2, {"name": "f1"}, 201),
    ]


async def test_many_at_once_make_one_chain(redis: Redis) -> None:
    logs = [AuditLog(redis, SECRET) for _ in range(3)]
    await asyncio.gather(*(noted(log, 10) for log in logs))
    entries, broken = await logs[0].read(100)
    assert [entry.number for entry in entries] == list(range(30, 0, -1)) and broken == 0


async def altered(redis: Redis) -> None:
    entry = unpack(await redis.lindex(ENTRIES, 4))  # type: ignore[misc,arg-type]
    await redis.lset(ENTRIES, 4, pack({**entry, "tenant": "someone"}))  # type: ignore[misc,arg-type]


async def removed(redis: Redis) -> None:
    await redis.lrem(ENTRIES, 1, await redis.lindex(ENTRIES, 4))  # type: ignore[misc,arg-type]


async def put_in(redis: Redis) -> None:
    await redis.linsert(ENTRIES, "BEFORE", await redis.lindex(ENTRIES, 4), pack(unpack(await redis.lindex(ENTRIES, 0))))  # type: ignore[misc,arg-type]


async def swapped(redis: Redis) -> None:
    rows = await redis.lrange(ENTRIES, 4, 5)  # type: ignore[misc]
    for index, row in zip((5, 4), rows, strict=True):
        await redis.lset(ENTRIES, index, row)  # type: ignore[misc]


async def first_gone(redis: Redis) -> None:
    await redis.lpop(ENTRIES)  # type: ignore[misc]


async def last_gone(redis: Redis) -> None:
    await redis.rpop(ENTRIES)  # type: ignore[misc]


async def all_gone(redis: Redis) -> None:
    await redis.delete(ENTRIES)


async def made_anew(redis: Redis) -> None:
    """By someone who knows how it is made, but not the secret."""
    await redis.delete(ENTRIES, HEAD)
    await noted(AuditLog(redis, "another secret"), 8)


async def forged(redis: Redis) -> None:
    """By someone who knows that the oldest entries give way, and has no secret."""
    await redis.delete(ENTRIES, HEAD)
    rows = [pack(Entry(number, 1.0, "acme", "key1", "GET", {}, 200).to_dict()) for number in range(6, MOST + 6)]
    await redis.rpush(ENTRIES, *rows)  # type: ignore[misc]
    await redis.set(HEAD, Head(MOST + 5).packed())


async def forged_oldest(redis: Redis) -> None:
    """One that stands where the first that is kept would stand: what came before it is only its own word."""
    await redis.delete(ENTRIES, HEAD)
    await redis.rpush(ENTRIES, *[pack(Entry(MOST + 1, 1.0, "acme", "k", "GET", {}, 200, "b" * 64, "d" * 64).to_dict())])  # type: ignore[misc]
    await redis.set(HEAD, Head(2 * MOST, "d" * 64).packed())


async def cut_off(redis: Redis) -> None:
    """The newest entries, and a head made to fit what is left."""
    await redis.ltrim(ENTRIES, 0, 6)  # type: ignore[misc]
    kept = unpack(await redis.lindex(ENTRIES, -1))  # type: ignore[misc,arg-type]
    await redis.set(HEAD, Head(7, kept["digest"], "e" * 64).packed())


@pytest.mark.parametrize(
    ("change", "broken"),
    [
        (altered, 5),
        (removed, 5),
        (put_in, 5),
        (swapped, 5),
        (first_gone, 1),
        (last_gone, 10),
        (all_gone, 1),
        (made_anew, 1),
        (forged, 6),
        (forged_oldest, MOST + 1),
        (cut_off, 8),
    ],
)
async def test_what_was_done_to_it_shows(redis: Redis, change: Callable[[Redis], Awaitable[None]], broken: int) -> None:
    log = AuditLog(redis, SECRET)
    await noted(log, 10)
    assert (await log.read(1))[1] == 0
    await change(redis)
    assert (await log.read(1))[1] == broken


async def test_the_oldest_entries_give_way(redis: Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit, "MOST", 5)
    log = AuditLog(redis, SECRET)
    await noted(log, 12)
    entries, broken = await log.read(100)
    assert [entry.number for entry in entries] == [12, 11, 10, 9, 8] and broken == 0
    await first_gone(redis)
    assert (await log.read(100))[1] == 8


async def test_an_altered_oldest_entry_shows_too(redis: Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit, "MOST", 5)
    await noted(AuditLog(redis, SECRET), 12)
    entry = unpack(await redis.lindex(ENTRIES, 0))  # type: ignore[misc,arg-type]
    await redis.lset(ENTRIES, 0, pack({**entry, "tenant": "someone"}))  # type: ignore[misc,arg-type]
    assert (await AuditLog(redis, SECRET).read(1))[1] == 8


async def test_a_forged_head_is_not_mended_by_the_next_change(redis: Redis) -> None:
    log = AuditLog(redis, SECRET)
    await noted(log, 10)
    await cut_off(redis)
    await noted(log, 3)
    assert (await log.read(1))[1] == 11
