"""The queue's operations. Each is one script, replay-safe: when a reply is lost, call again with the same arguments."""

import asyncio
import random
import secrets
import time
from collections.abc import Awaitable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict
from itertools import chain
from typing import Any, cast

import msgpack
from redis.asyncio import Redis

from stoker.queue import keys, replies
from stoker.queue.intake import Intake
from stoker.queue.records import (
    Backlog,
    Claim,
    Completion,
    Emission,
    Enqueued,
    Failure,
    Job,
    JobState,
    Limits,
    Metered,
    NewJob,
    NotReplayable,
    Settled,
    StoredChunk,
    function_of,
)
from stoker.queue.replies import View
from stoker.queue.scripts import Argument, Scripts

CLAIM_LIMIT = 512
TICK_BOUND = 100
DEAD_LETTER_PAGE = 1000
SETTLED = {answer.encode(): answer for answer in Settled}
BACKOFF_BASE_MS = 250
BACKOFF_CAP_MS = 30_000


class ClaimTicket:
    """Names one claim, so that asking again after a lost reply gets the same jobs and not more of them. `standing`: the
    number of the last claim, if it stands at the server and its jobs have not come; `room`: for how many it stands."""

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.origin = secrets.token_hex(6)
        self.number = 0
        self.standing: int | None = None
        self.room = 0

    def answered(self, *, stands: bool, room: int) -> None:
        self.standing = self.number if stands else None
        self.room = room
        self.number += 1


class Broker:
    """Enqueue, claim, renew, emit and settle jobs. `lease_ms`: how long a claim lasts without a beat.

    Retries wait uniformly between 0 and min(`backoff_cap_ms`, `backoff_base_ms` * 2^(attempt-1)): full jitter.
    Every method raises redis.exceptions.ConnectionError or TimeoutError when the server is away.
    """

    def __init__(
        self,
        client: Redis,
        *,
        lease_ms: int = 10_000,
        backoff_base_ms: int = BACKOFF_BASE_MS,
        backoff_cap_ms: int = BACKOFF_CAP_MS,
    ) -> None:
        self.lease_ms = lease_ms
        self._redis = client
        self._scripts = Scripts(client)
        self._backoff = (backoff_base_ms, backoff_cap_ms)
        self._intake = Intake(self._store)
        self._registered: set[str] = set()
        self._tickets: dict[tuple[str, str], ClaimTicket] = {}

    async def enqueue(self, job: NewJob) -> Enqueued:
        """Raises QueueFull or IdempotencyMismatch; then nothing was stored."""
        return replies.enqueued(job.id, await self._intake.put(job))

    def _store(self, function: str, jobs: Sequence[NewJob]) -> Awaitable[list[Any]]:
        """Sent at once when nothing has to come before. Raises what makes no bytes of a job."""
        sent = None
        if function in self._registered:
            sent = self._scripts.begin("enqueue", function, enqueue_arguments(jobs, listed=False))
        return self._stored(function, jobs, sent)

    async def _stored(self, function: str, jobs: Sequence[NewJob], sent: Awaitable[Any] | None) -> list[Any]:
        if sent is None:
            listed = await self._register(function)
            sent = self._scripts.run("enqueue", function, enqueue_arguments(jobs, listed))
        answers = await sent
        unlisted = [place for place, answer in enumerate(answers) if answer == [b"unlisted"]]
        if unlisted:
            self._registered.discard(function)
            await self._register(function)
            rest = enqueue_arguments([jobs[place] for place in unlisted])
            for place, answer in zip(unlisted, await self._scripts.run("enqueue", function, rest), strict=True):
                answers[place] = answer
        return answers

    async def claim(self, function: str, worker: str, limit: int) -> list[Claim]:
        """Up to `limit` jobs of one batch key, the least-served tenant first. Never blocks."""
        if limit < 1:
            return []
        ticket = self._tickets.setdefault((function, worker), ClaimTicket())
        async with ticket.lock:
            return await self.claim_with(ticket, function, worker, limit)

    async def claim_with(
        self,
        ticket: ClaimTicket,
        function: str,
        worker: str,
        limit: int,
        stand_ms: int = 0,
        lowest: int = -1,
        but: Collection[str] = (),
    ) -> list[Claim]:
        """Like `claim`, one call at a time per ticket; a claim without work stands for `stand_ms` (see Claimer). With
        `lowest`, jobs of the lowest priority are counted apart, up to that many. No jobs of the tenants in `but`."""
        unheard: tuple[Argument, ...] = ("", "") if ticket.standing is None else (ticket.standing, ticket.room)
        room = min(limit, CLAIM_LIMIT)
        rest: list[Argument] = [room, self.lease_ms, stand_ms, min(lowest, CLAIM_LIMIT), packed_names(but)]
        rows = await self._scripts.run("claim", function, [worker, ticket.origin, ticket.number, *unheard, *rest])
        ticket.answered(stands=stand_ms > 0 and not rows, room=room)
        return [replies.claim(function, row) for row in rows]

    async def beat(self, function: str, worker: str, held: Mapping[str, int]) -> dict[str, str]:
        """Renews the leases of `held` (job id -> fence). Returns the lost ones: "cancelled", "timed_out" or "lost"."""
        if not held:
            return {}
        pairs = chain.from_iterable(held.items())
        flat = await self._scripts.run("beat", function, [worker, self.lease_ms, *pairs])
        return {job_id.decode(): reason.decode() for job_id, reason in zip(flat[::2], flat[1::2], strict=True)}

    async def set_aside(self, function: str, held: Mapping[str, int]) -> int:
        """Jobs (id -> fence) that are kept but not run: until the next claim, readers find them queued and no limit of
        a run ends them. Returns how many of them are held."""
        return await self._scripts.run("aside", function, list(chain.from_iterable(held.items())))

    async def led_to(self, job_id: str, other: str) -> bool:
        """The code of a running job led to another job of its function: should it run out of time while that one waits,
        it says so. False: it runs no more."""
        return bool(await self._scripts.run("led", function_of(job_id), [job_id, other]))

    def emit(self, function: str, emissions: Sequence[Emission]) -> Awaitable[list[str]]:
        """One round trip for all, begun at once if the connection is open. Returns the ids of jobs that these fences no
        longer hold."""
        return stale_ids(self._scripts.begin("emit", function, list(chain.from_iterable(emissions))))

    async def done(self, function: str, completions: Sequence[Completion]) -> list[Settled]:
        """Result, terminal event and usage record in one step, for each fence that still holds its job."""
        if not completions:
            return []
        parts = [part for item in completions for part in completion_arguments(item)]
        return settled(await self._scripts.run("done", function, parts))

    async def fail(self, function: str, failures: Sequence[Failure]) -> list[Settled]:
        """Retries after a delay, ends the job, or hands it back; DONE means it is over and FAILED."""
        if not failures:
            return []
        parts = [part for item in failures for part in failure_arguments(item)]
        return settled(await self._scripts.run("fail", function, [*self._backoff, *parts]))

    async def meter(self, function: str, metered: Sequence[Metered]) -> int:
        """Usage of attempts that a cancel or a deadline stopped; each is recorded once. Returns how many were."""
        if not metered:
            return 0
        parts: list[Argument] = [part for item in metered for part in (item.job_id, item.fence, item.usage)]
        return await self._scripts.run("meter", function, parts)

    async def cancel(self, job_id: str, reason: str = "cancelled") -> JobState | None:
        """The state after the call (a job that had ended stays as it was), or None for an unknown job."""
        state = await self._scripts.run("cancel", function_of(job_id), [job_id, reason])
        return JobState(state.decode()) if state else None

    async def tick(self, function: str) -> int:
        """Requeues expired leases, applies deadlines, promotes delayed jobs; bounded. Returns how many it touched."""
        return await self._scripts.run("tick", function, [TICK_BOUND])

    async def tick_all(self, functions: Iterable[str] = ()) -> None:
        """These, and all others that may have a job, in one round trip."""
        await self._scripts.run_each("tick", sorted({*functions, *await self._functions()}), [TICK_BOUND])

    async def job(self, job_id: str) -> Job | None:
        """None: it never existed or its retention has passed."""
        function = function_of(job_id)
        reply = await self._scripts.run("look", function, [job_id])
        return replies.job(function, job_id, reply) if reply else None

    async def job_id_of(self, function: str, tenant: str, idempotency_key: str) -> str | None:
        """The job that was made with this key, as long as its record is kept."""
        digest = keys.idempotency_digest(tenant, idempotency_key)
        value: Any = await self._redis.get(keys.key(function, f"i:{digest}"))
        return value.partition(b":")[0].decode() if value else None

    async def forget_key(self, job_id: str, tenant: str, idempotency_key: str) -> None:
        """The next job with this key is a new one, if until now the key leads to the job `job_id`."""
        digest = keys.idempotency_digest(tenant, idempotency_key)
        await self._scripts.run("forget", function_of(job_id), [digest, job_id])

    async def payload(self, job_id: str) -> bytes | None:
        """As it was enqueued; kept of a job that lives, or is dead or failed."""
        value: Any = await self._redis.get(keys.key(function_of(job_id), f"p:{job_id}"))
        return value

    async def dead_letters(self, function: str, limit: int = 100, after: str = "", *, tenant: str = "") -> list[Job]:
        """Jobs whose attempts are used up, the newest first, behind the job id `after`; of one tenant if given."""
        most = max(0, min(limit, DEAD_LETTER_PAGE))
        rows = await self._scripts.run("dead", function, [tenant, most, after])
        return [replies.job(function, row[0].decode(), [row[1], row[2], None]) for row in rows]

    async def replay(self, job_id: str, request: str = "") -> JobState | None:
        """Queues a dead or failed job again, with all its attempts, behind the others; its retention starts anew at its
        new end. Returns its state, or None for an unknown job; raises NotReplayable.

        `request` names this replay: to repeat the call after a lost reply, give the same name again.
        """
        function = function_of(job_id)
        self._registered.discard(function)
        await self._register(function)
        reply = await self._scripts.run("replay", function, [job_id, request or secrets.token_hex(8)])
        if reply is None:
            return None
        state = JobState(reply[1].decode())
        if not reply[0]:
            raise NotReplayable(job_id, state)
        return state

    async def backlogs(self, functions: Sequence[str]) -> dict[str, Backlog]:
        """One round trip for all."""
        if not functions:
            return {}
        rows = await self._scripts.run_each("stat", functions)
        return {function: replies.backlog(function, row) for function, row in zip(functions, rows, strict=True)}

    async def chunks(self, job_id: str, after: str = "0") -> list[StoredChunk]:
        """The kept chunks behind the stream id `after`."""
        entries: Any = await self._redis.xrange(keys.chunks(function_of(job_id), job_id), min=f"({after}")
        return replies.stored_chunks(entries)

    async def peek(self, function: str, positions: Sequence[tuple[str, str]], most: int) -> list[View | None]:
        """For each watched (job id, last stream id seen) the state and up to `most` entries behind that id."""
        pairs = [part for position in positions for part in position]
        return replies.views(await self._scripts.run("peek", function, [most, *pairs]))

    async def listen(self, job_id: str, gateway: str) -> bool:
        """Sends the job's events to `gateway` too. False when it has ended or is unknown: read it instead."""
        return bool(await self._scripts.run("listen", function_of(job_id), [job_id, gateway]))

    async def functions_with_work(self) -> list[str]:
        """Functions with a queued, delayed or running job."""
        backlogs = await self.backlogs(sorted(await self._functions()))
        return [name for name, row in backlogs.items() if row.queued or row.running or row.delayed]

    async def _functions(self) -> set[str]:
        return {name.decode() for name in await self._redis.smembers(keys.FUNCTIONS)}  # type: ignore[misc]

    async def set_limits(self, function: str, limits: Limits) -> None:
        """Takes effect with the next call. Workers that wait are told when more may run than before."""
        rates = {name: value for name, value in asdict(limits).items() if "per_minute" in name}
        values: dict[str, float] = {
            "limit": limits.max_queued,
            "tenant_limit": limits.max_queued_per_tenant,
            "run_limit": limits.max_running,
            "tenant_run_limit": limits.max_running_per_tenant,
            "paced": int(any(rates.values())),
            **rates,
        }
        await self._redis.hset(keys.meta(function), mapping=values)  # type: ignore[misc]
        await self._redis.publish(keys.bell_channel(function), b"")

    async def set_cold_start(self, function: str, milliseconds: int) -> None:
        """How long its workers take to start, as measured last: whoever is refused while none is awake waits for it."""
        await self._redis.hset(keys.meta(function), "cold_start", str(milliseconds))  # type: ignore[misc]

    async def purge_function(self, function: str) -> None:
        """Cancels every live job and forgets the function; ended jobs stay readable for their retention."""
        while await self._scripts.run("purge", function, [TICK_BOUND]):
            pass
        self._registered.discard(function)
        now = time.time()
        await self._redis.zremrangebyscore(keys.DELETED, "-inf", now - keys.DELIVERY_KEPT_S)
        await self._redis.zadd(keys.DELETED, {function: now})
        await self._redis.expire(keys.DELETED, keys.DELIVERY_KEPT_S)
        await self._redis.srem(keys.FUNCTIONS, function)  # type: ignore[misc]
        # A job that came in between must be seen by whoever sweeps.
        if await self._redis.exists(keys.meta(function)):
            await self._redis.sadd(keys.FUNCTIONS, function)  # type: ignore[misc]

    async def _register(self, function: str) -> bool:
        """Before the first job, so that no crash leaves one that the controller's sweep can't see. False when this
        process had done so before; then another may have purged the function since."""
        if function in self._registered:
            return False
        await self._redis.sadd(keys.FUNCTIONS, function)  # type: ignore[misc]
        self._registered.add(function)
        return True


def packed_names(names: Collection[str]) -> bytes:
    return cast(bytes, msgpack.packb([*names], use_bin_type=False)) if names else b""


async def stale_ids(reply: Awaitable[list[bytes]]) -> list[str]:
    return list(dict.fromkeys(job_id.decode() for job_id in await reply))


def enqueue_arguments(jobs: Sequence[NewJob], listed: bool = True) -> list[Argument]:
    """`listed`: the function was just named in the list of functions."""
    arguments: list[Argument] = [int(listed)]
    for job in jobs:
        arguments += (
            job.id,
            job.tenant,
            job.payload,
            job.priority,
            job.cost,
            job.batch_key,
            job.max_attempts,
            int(job.stream),
            job.gateway,
            job.run_within_ms,
            job.retention_ms,
            rare_arguments(job),
        )
    return arguments


def rare_arguments(job: NewJob) -> bytes:
    """What most jobs don't have, as the script names it; b"" for a job that has none of it."""
    values = {
        "idem": keys.idempotency_digest(job.tenant, job.idempotency_key),
        "digest": job.request_digest,
        "start": job.start_within_ms,
        "finish": job.finish_within_ms,
        "delay": job.delay_ms,
        "weight": job.weight if job.weight != 1 else 0,
        "hook": job.webhook,
        "route": job.route,
        "caller": job.caller,
    }
    present = {name: value for name, value in values.items() if value}
    return cast(bytes, msgpack.packb(present, use_bin_type=False)) if present else b""


def completion_arguments(item: Completion) -> list[Argument]:
    return [*item[:5], "" if item.cost is None else item.cost]


def failure_arguments(item: Failure) -> list[Argument]:
    flags = [int(item.retry), int(item.counts)]
    return [item.job_id, item.fence, item.error, *flags, item.usage, item.notes, random.random()]


def settled(reply: list[bytes]) -> list[Settled]:
    return [SETTLED[answer] for answer in reply]
