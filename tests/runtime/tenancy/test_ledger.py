import asyncio
import json
import time
from typing import Any

import pytest
from redis.asyncio import Redis

from stoker.coldstart.store import ObjectStore
from stoker.queue.broker import Broker
from stoker.queue.records import Completion, Failure, Metered, NewJob, new_job_id, pack
from stoker.runtime.tenancy import ledger
from stoker.runtime.tenancy.admission import Admission, Refused, spent
from stoker.runtime.tenancy.billing_days import day_of, month_of
from stoker.runtime.tenancy.directory import EVERY_FUNCTION, Directory
from stoker.runtime.tenancy.ledger import METRICS, Ledger, by_book, entry_of
from stoker.runtime.tenancy.price import Price
from stoker.runtime.tenancy.tenant import Tenant, TenantLimits

USAGE = {"busy_ms": 250.0, "start_ms": 100.0, "prompt_tokens": 1000, "cached_tokens": 400, "completion_tokens": 50}
PRICE = Price(request=0.001, second=0.004, prompt_tokens=1.0, cached_tokens=0.1, completion_tokens=4.0)
COST = 1000 + 1000 + 600 + 40 + 200


async def refusal(admissions: Admission, tenant: Tenant, job_id: str, tokens: float, cost: int) -> Refused | None:
    return (await admissions.reserve(tenant, job_id, tokens, cost)).refused


async def run_jobs(
    broker: Broker, function: str, tenants: list[str], state: str = "succeeded", usage: dict[str, Any] = USAGE
) -> None:
    for tenant in tenants:
        job = NewJob(id=new_job_id(function), function=function, tenant=tenant, payload=b"", max_attempts=1)
        await broker.enqueue(job)
    for claim in await broker.claim(function, "worker", 500):
        if state == "succeeded":
            await broker.done(function, [Completion(claim.job_id, claim.fence, pack({}), pack(usage))])
        else:
            await broker.fail(function, [Failure(claim.job_id, claim.fence, pack({}), False, usage=pack(USAGE))])


async def sums(books: Ledger, tenant: str, function: str = "chat") -> dict[str, int]:
    found = await books.daily(tenant, [day_of(time.time())])
    return found.get((day_of(time.time()), function), dict.fromkeys(METRICS, 0))


async def month(redis: Redis, tenant: str) -> int:
    return int(await redis.get(spent(tenant, month_of(time.time()))) or 0)


async def test_each_job_is_on_the_bill_once(books: Ledger, broker: Broker, tenants: Directory, redis: Redis) -> None:
    await tenants.put_price("chat", PRICE)
    await run_jobs(broker, "chat", ["ann", "bob", "ann"])
    assert [await books.collect() for _ in range(3)] == [3, 0, 0]
    assert await sums(books, "ann") == {
        "jobs": 2,
        "failed": 0,
        "run_us": 500_000,
        "cold_us": 200_000,
        "prefill_us": 0,
        "decode_us": 0,
        "swap_us": 0,
        "prompt_tokens": 2000,
        "cached_tokens": 800,
        "completion_tokens": 100,
        "micro_usd": 2 * COST,
    }
    assert (await sums(books, "bob"))["micro_usd"] == await month(redis, "bob") == COST
    assert await month(redis, "ann") == 2 * COST


async def test_what_failed_is_on_record_and_free(books: Ledger, broker: Broker, tenants: Directory) -> None:
    await tenants.put_price(EVERY_FUNCTION, PRICE)
    await run_jobs(broker, "chat", ["ann"], state="failed")
    await books.collect()
    found = await sums(books, "ann")
    assert (found["jobs"], found["failed"], found["micro_usd"]) == (1, 1, 0)


async def test_a_price_holds_for_what_was_entered_under_it(books: Ledger, broker: Broker, tenants: Directory) -> None:
    await tenants.put_price(EVERY_FUNCTION, Price(request=1))
    await run_jobs(broker, "chat", ["ann"])
    await books.collect()
    await tenants.put_price("chat", Price(request=5))
    await run_jobs(broker, "chat", ["ann"])
    await books.collect()
    assert (await sums(books, "ann"))["micro_usd"] == 6_000_000


@pytest.mark.parametrize("step", ["before books", "after books", "between tenants"])
async def test_a_ledger_killed_at_any_step_enters_nothing_twice(
    step: str, books: Ledger, broker: Broker, tenants: Directory, redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    await tenants.put_price("chat", Price(request=1))
    await run_jobs(broker, "chat", ["ann", "bob", "ann", "bob"])
    booked = books._book
    calls = 0

    async def dying(**arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if step == "before books" or (step == "between tenants" and calls == 2):
            raise asyncio.CancelledError
        answer = await booked(**arguments)
        if step == "after books" and calls == 2:
            raise asyncio.CancelledError
        return answer

    books._book = dying
    with pytest.raises(asyncio.CancelledError):
        await books.collect()
    books._book = booked
    await books.collect()
    for tenant in ("ann", "bob"):
        assert (await sums(books, tenant))["jobs"] == 2
        assert await month(redis, tenant) == 2_000_000


async def test_each_adapter_has_a_bill_of_its_own(
    books: Ledger, broker: Broker, tenants: Directory, store: ObjectStore, redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when ledgers overtake each other between the adapters of one batch of records."""
    monkeypatch.setattr(ledger, "BATCH", 7)
    await tenants.put_price("chat", Price(request=1))
    for adapter in ("", "sql", "", "poems") * 5:
        await run_jobs(broker, "chat", ["ann"], usage=USAGE | ({"adapter": adapter} if adapter else {}))
    await asyncio.gather(*(Ledger(redis, tenants, store).collect() for _ in range(4)))
    jobs = {name: (await sums(books, "ann", name))["jobs"] for name in ("chat", "chat:sql", "chat:poems")}
    assert jobs == {"chat": 10, "chat:sql": 5, "chat:poems": 5}
    assert await month(redis, "ann") == 20_000_000
    await books.export()
    exported = [json.loads(line) for info in store.list("usage/") for line in store.read(info.key).splitlines()]
    assert sorted(line["adapter"] for line in exported) == [""] * 10 + ["poems"] * 5 + ["sql"] * 5


async def test_many_ledgers_at_once_agree(
    broker: Broker, tenants: Directory, store: ObjectStore, redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger, "BATCH", 7)
    await tenants.put_price("chat", Price(request=1))
    await run_jobs(broker, "chat", [f"tenant{n % 5}" for n in range(100)])
    await asyncio.gather(*(Ledger(redis, tenants, store).collect() for _ in range(8)))
    books = Ledger(redis, tenants, store)
    assert [(await sums(books, f"tenant{n}"))["jobs"] for n in range(5)] == [20] * 5
    assert [await month(redis, f"tenant{n}") for n in range(5)] == [20_000_000] * 5


async def test_settling_frees_what_was_reserved(books: Ledger, broker: Broker, redis: Redis) -> None:
    tenant, admissions = Tenant("ann", limits=TenantLimits(concurrency=1, budget_usd=1)), Admission(redis)
    job = NewJob(id=new_job_id("chat"), function="chat", tenant="ann", payload=b"")
    assert await refusal(admissions, tenant, job.id, 0, 1_000_000) is None
    await admissions.keep("ann", job.id)
    await broker.enqueue(job)
    [claim] = await broker.claim("chat", "worker", 1)
    assert await refusal(admissions, tenant, "next", 0, 1_000_000)
    await broker.done("chat", [Completion(claim.job_id, claim.fence, pack({}), pack(USAGE))])
    await books.collect()
    assert await refusal(admissions, tenant, "next", 0, 1_000_000) is None


async def test_a_deleted_functions_usage_is_still_billed(books: Ledger, broker: Broker, tenants: Directory) -> None:
    await tenants.put_price(EVERY_FUNCTION, Price(request=1))
    await run_jobs(broker, "chat", ["ann"])
    await books.collect()
    await run_jobs(broker, "chat", ["ann"])
    await broker.purge_function("chat")
    await books.collect()
    assert (await sums(books, "ann"))["jobs"] == 2


async def test_lines_and_books_have_the_same_price(
    books: Ledger, broker: Broker, tenants: Directory, store: ObjectStore
) -> None:
    """The one of the moment when a job was entered, whatever it is when the lines are written."""
    for price, jobs in ((PRICE, 2), (Price(request=1), 1), (Price(), 1), (PRICE, 1)):
        await tenants.put_price("chat", price)
        await run_jobs(broker, "chat", ["ann"] * jobs)
        await books.collect()
    await tenants.put_price("chat", Price(request=9))
    assert await books.export() == 5
    await run_jobs(broker, "chat", ["ann"])
    await books.collect()
    await tenants.put_price("chat", Price())
    assert await books.export() == 1
    rows = [json.loads(line) for info in store.list("usage/") for line in store.read(info.key).splitlines()]
    wanted = [COST, COST, 1_000_000, 0, COST, 9_000_000]
    assert [row["micro_usd"] for row in sorted(rows, key=lambda row: row["id"])] == wanted
    assert (await sums(books, "ann"))["micro_usd"] == sum(wanted)


async def test_a_function_deleted_before_anything_was_entered_is_on_record(
    books: Ledger, broker: Broker, tenants: Directory, redis: Redis
) -> None:
    """Its first job, say, is cancelled by the deletion: it is in the books, and its reservation ends."""
    tenant, admissions = Tenant("ann", limits=TenantLimits(concurrency=1)), Admission(redis)
    await tenants.put_price(EVERY_FUNCTION, Price(request=1))
    job = NewJob(id=new_job_id("brief"), function="brief", tenant="ann", payload=b"")
    assert await refusal(admissions, tenant, job.id, 0, 0) is None
    await broker.enqueue(job)
    await admissions.keep("ann", job.id)
    await broker.claim("brief", "worker", 1)
    await asyncio.sleep(0.01)
    await books.expect("brief")
    await broker.purge_function("brief")
    assert [await books.collect(), await books.collect()] == [1, 0]
    assert (await sums(books, "ann", "brief"))["jobs"] == 1
    assert await refusal(admissions, tenant, "next", 0, 0) is None


async def test_entries_are_kept_as_lines_once(
    books: Ledger, broker: Broker, tenants: Directory, store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger, "BATCH", 4)
    await tenants.put_price("chat", PRICE)
    await run_jobs(broker, "chat", ["ann"] * 10)
    assert await books.export() == 0
    await books.collect()
    assert [await books.export(), await books.export()] == [10, 0]
    names = [info.key for info in store.list("usage/")]
    assert len(names) == 3
    rows = [json.loads(line) for name in names for line in store.read(name).splitlines()]
    assert len({row["job"] for row in rows}) == 10
    assert {(row["tenant"], row["function"], row["state"], row["micro_usd"]) for row in rows} == {
        ("ann", "chat", "succeeded", COST)
    }


async def test_a_stopped_jobs_tokens_are_billed_beside_its_time(
    books: Ledger, broker: Broker, tenants: Directory
) -> None:
    await tenants.put_price("chat", Price(request=1, completion_tokens=1.0))
    job = NewJob(id=new_job_id("chat"), function="chat", tenant="ann", payload=b"")
    await broker.enqueue(job)
    [claim] = await broker.claim("chat", "worker", 1)
    await broker.cancel(job.id)
    await books.collect()
    await broker.meter("chat", [Metered(job.id, claim.fence, pack(USAGE))])
    await books.collect()
    found = await sums(books, "ann")
    assert (found["jobs"], found["failed"], found["completion_tokens"], found["prompt_tokens"]) == (1, 1, 50, 1000)
    assert (found["run_us"], found["micro_usd"]) == (250_000, 1_000_050)


async def test_of_records_that_were_entered_in_part_the_rest_is_entered(
    books: Ledger, broker: Broker, tenants: Directory, redis: Redis
) -> None:
    """As when a ledger was killed before it had noted how far it came, and more was recorded meanwhile."""
    await tenants.put_price("chat", Price(request=1))
    await run_jobs(broker, "chat", ["ann", "bob"] * 5)
    await books.collect()
    await run_jobs(broker, "chat", ["ann", "ann", "bob"])
    await redis.delete(ledger.ENTERED)
    assert await books.collect() == 13
    assert [(await sums(books, tenant))["jobs"] for tenant in ("ann", "bob")] == [7, 6]
    assert [await month(redis, tenant) for tenant in ("ann", "bob")] == [7_000_000, 6_000_000]


def test_records_around_midnight_are_in_the_books_of_their_days() -> None:
    midnight_ms = 1_798_761_600_000
    fields = {b"job": b"j", b"attempt": b"1", b"state": b"succeeded", b"usage": b""}
    rows = [(midnight_ms - 1, b"ann"), (midnight_ms - 1, b"bob"), (midnight_ms, b"ann"), (midnight_ms + 1, b"ann")]
    entries = [entry_of("chat", f"{ms}-0", {**fields, b"tenant": tenant}, Price()) for ms, tenant in rows]
    assert by_book(entries) == {
        ("ann", "2026-12-31", ""): entries[:1],
        ("bob", "2026-12-31", ""): entries[1:2],
        ("ann", "2027-01-01", ""): entries[2:],
    }
