"""One loaded copy of a function on this host: what all kinds share. The kinds say how to load, run and abort."""

import asyncio
import contextlib
import logging
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from stoker.coldstart.failures import ColdStartError, StoreUnavailable
from stoker.coldstart.timeline import Timeline
from stoker.queue.records import Claim, Completion, Failure, Metered, pack
from stoker.queue.retry import insist
from stoker.runtime import payloads
from stoker.runtime.error_record import bounded
from stoker.runtime.spec import FunctionSpec
from stoker.runtime.worker.busy_share import BusyShare
from stoker.runtime.worker.company import Company
from stoker.runtime.worker.error_records import start_record, store_record
from stoker.runtime.worker.host import PATIENCE_S, Host
from stoker.runtime.worker.last_words import why_stopped
from stoker.runtime.worker.outbox import Outbox
from stoker.runtime.worker.replica_log import ReplicaLog
from stoker.runtime.worker.set_aside import Aside, SetAside
from stoker.runtime.worker.wait_phases import phase, waiting, waiting_for_start

State = Literal["starting", "loading", "ready", "draining", "failed", "gone"]
Record = dict[str, Any]

MANY_FAILURES = 3
DRAIN_LOOK_S = 0.02

log = logging.getLogger("stoker.worker")


class StartFailed(Exception):
    """A replica could not start; `error` is the record its waiting jobs get."""

    def __init__(self, error: Record) -> None:
        self.error = bounded(error)
        super().__init__(self.error["message"])


@dataclass(frozen=True, slots=True)
class Start:
    """Why a replica is started: how many of its version failed to start before it, in a row; and whether it is to
    relieve another version, which serves on, or is woken, should this start fail."""

    failed_before: int = 0
    relieves: bool = False


class Replica(ABC):
    """Life: starting, loading, ready, draining, gone; or failed, and then the controller decides what comes next."""

    isolation = "shared-engine"

    def __init__(self, id: str, spec: FunctionSpec, host: Host, start: Start) -> None:
        self.id = id
        self._start = start
        self.spec = spec
        self.host = host
        self.state: State = "starting"
        self.error: Record | None = None
        self.held: dict[str, Claim] = {}
        self.timeline = Timeline()
        self.outbox = Outbox(host.broker, spec.name, self.lose)
        self.claimer = host.claimer(spec.name)
        self.log = ReplicaLog(host.logs, spec.name, id)
        self._claimed_ns: dict[str, int] = {}
        self._share = BusyShare()
        self._untold_start_ms = 0.0
        self._ready_at = 0
        self._grace_ends = math.inf
        self._started_at = time.monotonic_ns()
        self._room = asyncio.Event()
        self._storing: dict[str, asyncio.Task[None]] = {}
        self._stopping = asyncio.Event()
        self.aside = SetAside(self, self._stopping, self._room)
        self.company = Company(spec, self.held, self._room, self._stopping, self._give_back)
        self._task: asyncio.Task[None] | None = None

    @abstractmethod
    async def load(self) -> None:
        """Until ready to run; raises StartFailed, ColdStartError or OSError."""

    @abstractmethod
    async def unload(self) -> None:
        """Gives everything back; also called after a failed load."""

    @abstractmethod
    async def take_work(self) -> None:
        """Claims what there is room for and starts it, or waits a moment for work."""

    @abstractmethod
    def free(self) -> int:
        """How many more jobs could be started now."""

    @abstractmethod
    def abort(self, job_id: str) -> None:
        """Stops computing for a job that no longer belongs to this host."""

    def begun(self, job_id: str) -> bool:
        """Whether a job that is held may have been worked on."""
        return job_id not in self.company.waiting

    def used(self, job_id: str) -> Record:
        """What a job has used so far beside time, where the kind knows it."""
        return {}

    def run_phases(self, claim: Claim, begun_ns: int) -> list[Record]:
        """Timeline records of the job's own run, when the kind knows more than its whole length."""
        return []

    def progress(self) -> tuple[int, int]:
        """Bytes loaded and bytes in all."""
        return 0, 0

    def settled(self) -> bool:
        """Whether nothing of the start can fail any more, once the replica is ready."""
        return True

    async def last_words(self) -> str:
        return f"{self.state}: {self.error['message']}" if self.error else await why_stopped(self.spec, self.host)

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def stop(self, grace_s: float) -> None:
        """Drains: no new work, what runs may finish within `grace_s`, the rest goes back to the head of its lane.
        Called again, it can only shorten the grace."""
        self._grace_ends = min(self._grace_ends, time.monotonic() + grace_s)
        self._stopping.set()
        self._room.set()
        if self._task is None:
            return
        if self.state in ("starting", "loading"):
            self._task.cancel()
        if self.state in ("starting", "loading", "ready"):
            self.state = "draining"
        while not self._task.done():
            if time.monotonic() >= self._grace_ends:
                self._hand_back()
            await asyncio.wait([self._task], timeout=DRAIN_LOOK_S)
        with contextlib.suppress(asyncio.CancelledError):
            await self._task

    def lose(self, job_id: str, reason: str = "lost") -> None:
        """The job was cancelled, timed out or given to another worker: stop, and say no more than what it had used."""
        self.aside.lose(job_id)
        if claim := self.held.pop(job_id, None):
            usage, _ = self._records(claim, self.used(job_id))
            self.outbox.meter(Metered(job_id, claim.fence, pack(usage)))
            self.outbox.forget(job_id)
            self.abort(job_id)
            self._room.set()

    def crash(self, error: Record) -> None:
        """What ran the jobs died: they are retried elsewhere and this replica is over. What had not begun goes back as
        it came, also what is still handed over; a result that is being stored is kept."""
        if self.state in ("failed", "gone"):
            return
        self.state, self.error = "failed", bounded(error)
        for claim in [claim for claim in self.held.values() if claim.job_id not in self._storing]:
            if self.begun(claim.job_id):
                self.fail(claim, error, retry=True)
            else:
                self._give_back(claim)
        self._stopping.set()
        self._room.set()
        self.claimer.nudge()

    def complete(self, claim: Claim, result: Record, usage: Record, cost: float | None = None) -> None:
        """A big result is stored first; until then the job is held."""
        packed = pack(result)
        if len(packed) <= payloads.INLINE_LIMIT:
            self._complete(claim, packed, usage, cost)
            return
        storing = asyncio.create_task(self._store(claim, packed, usage, cost))
        self._storing[claim.job_id] = storing
        storing.add_done_callback(lambda _: self._storing.pop(claim.job_id, None))

    async def _store(self, claim: Claim, packed: bytes, usage: Record, cost: float | None) -> None:
        try:
            carried = await asyncio.to_thread(payloads.put_result, self.host.store, claim.job_id, claim.fence, packed)
        except ColdStartError as error:
            self.fail(claim, store_record(error), retry=True)
        else:
            self._complete(claim, carried, usage, cost)

    def _complete(self, claim: Claim, packed: bytes, usage: Record, cost: float | None) -> None:
        if not self._drop(claim):
            return
        usage, notes = self._records(claim, usage)
        self.outbox.complete(Completion(claim.job_id, claim.fence, packed, pack(usage), pack(notes), cost))

    def _drop(self, claim: Claim) -> bool:
        """False: this attempt was not held any more."""
        held = self.held.get(claim.job_id)
        if held is None or held.fence != claim.fence:
            return False
        del self.held[claim.job_id]
        self._room.set()
        return True

    def fail(self, claim: Claim, error: Record, *, retry: bool, counts: bool = True) -> None:
        if not self._drop(claim):
            return
        used, notes = self._records(claim, self.used(claim.job_id))
        self.outbox.fail(
            Failure(
                job_id=claim.job_id,
                fence=claim.fence,
                error=pack(bounded(error)),
                retry=retry,
                counts=counts,
                usage=pack(used),
                notes=pack(notes),
            )
        )

    def part_with(self, claim: Claim, error: Record) -> Aside | None:
        """What another version's job has used so far; None: it was not held any more."""
        if not self._drop(claim):
            return None
        usage, notes = self._records(claim, self.used(claim.job_id))
        return Aside(claim, error, pack(usage), pack(notes), time.monotonic())

    def hold(self, claim: Claim) -> None:
        self.held[claim.job_id] = claim
        self._claimed_ns[claim.job_id] = time.monotonic_ns()
        self._share.begin(claim.job_id)

    async def room(self) -> int:
        """Waits until there is room for a job; 0: there will be none any more."""
        while not self._stopping.is_set() and not self.company.closed:
            if not self.aside.full and (free := self.company.room(self.free())):
                return free
            self._room.clear()
            await self._room.wait()
        return 0

    async def claim(self, limit: int, lowest: int = -1, but: Collection[str] = ()) -> list[Claim]:
        """Up to `limit` jobs, as `take` gives them; [] after a moment without any. The rest as for the claimer."""
        claims = await insist(lambda: self.claimer.claim_or_stand(limit, lowest, but), PATIENCE_S)
        return await self.take(claims or await self.claimer.wait())

    async def claim_now(self, limit: int) -> list[Claim]:
        return await self.take(await insist(lambda: self.claimer.claim(limit), PATIENCE_S))

    async def take(self, claims: Sequence[Claim]) -> list[Claim]:
        """Holds them, so that their leases are renewed, and reads their payloads, wherever those are; a job whose
        payload can't be read is failed here. After a crash they go back at once."""
        for claim in claims:
            self.hold(claim)
            if self.state == "failed":
                self._give_back(claim)
        if stored := [claim for claim in claims if payloads.is_reference(claim.payload)]:
            await asyncio.gather(*map(self._read_payload, stored))
        return [self.held[claim.job_id] for claim in claims if claim.job_id in self.held]

    async def _read_payload(self, claim: Claim) -> None:
        try:
            payload = await asyncio.to_thread(payloads.get, self.host.store, claim.job_id, claim.payload)
        except ColdStartError as error:
            self.fail(claim, store_record(error), retry=isinstance(error, StoreUnavailable))
        else:
            if self.held.get(claim.job_id) is claim:
                self.held[claim.job_id] = claim._replace(payload=payload)

    def report(self) -> Record:
        loaded, total = self.progress()
        return {
            "function": self.spec.name,
            "version": self.spec.version,
            "state": self.state,
            "settled": self.settled(),
            "loaded_bytes": loaded,
            "total_bytes": total,
            "inflight": len(self.held),
            "error": self.error,
            "cold_start": {"records": self.timeline.records()} if self._ready_at else None,
        }

    async def _run(self) -> None:
        self.outbox.start()
        self.log.say(f"starts on host {self.host.id}: version {self.spec.version}")
        try:
            await self._load()
            self.log.say(f"ready in {self._untold_start_ms / 1000:.2f} s")
            telling = asyncio.create_task(self._tell_cold_start())
            while not self._stopping.is_set() and self.state == "ready":
                await self.take_work()
            await self._leave()
            await self._until_nothing_is_held()
            await self.outbox.drained()
            await telling
        except StartFailed as failure:
            await self._fail_waiting(failure.error)
        finally:
            await self.unload()
            await self.outbox.close()
            self.log.say(await self.last_words())
            await self.log.close()
            if self.state != "failed":
                self.state = "gone"

    async def _load(self) -> None:
        limit_s = self.spec.limits.start_up_within_s
        try:
            async with asyncio.timeout(limit_s or None):
                await self.load()
        except StartFailed:
            raise
        except Exception as error:
            raise StartFailed(start_record(error, limit_s)) from error
        self._ready_at = time.monotonic_ns()
        self._untold_start_ms = (self._ready_at - self._started_at) / 1e6
        if self.state in ("starting", "loading"):
            self.state = "ready"

    async def _fail_waiting(self, error: Record) -> None:
        """A load that fails uses up one attempt of every job that waited for it, so that none waits for ever. After
        several failures in a row nobody is made to wait through more of them. Where another version serves, or can be
        woken to, the jobs are left to it."""
        log.error("replica %s of %s failed to start: %s", self.id, self.spec.name, error["message"])
        self.state, self.error = "failed", error
        self.log.traceback(error.get("traceback") or "")
        failed = partial(self.fail, error=error, retry=self._start.failed_before + 1 < MANY_FAILURES)
        for claim in list(self.held.values()):
            self.abort(claim.job_id)
            (self._give_back if self._start.relieves else failed)(claim)
        self.aside.give_back()
        for claim in [] if self._start.relieves else await insist(lambda: self.claimer.claim(1000), PATIENCE_S):
            self.hold(claim)
            failed(claim)
        await self.outbox.drained()

    async def _tell_cold_start(self) -> None:
        took_ms = round((self._ready_at - self._started_at) / 1e6)
        await insist(lambda: self.host.broker.set_cold_start(self.spec.name, took_ms), PATIENCE_S)

    async def _leave(self) -> None:
        """What a standing claim got in the last moment goes back at once."""
        for claim in await insist(self.claimer.leave, PATIENCE_S):
            self.hold(claim)
            self._give_back(claim)
        self.aside.give_back()

    async def _until_nothing_is_held(self) -> None:
        while self.held:
            self._room.clear()
            await self._room.wait()

    def _hand_back(self) -> None:
        for claim in list(self.held.values()):
            self.abort(claim.job_id)
            self._give_back(claim)

    def _give_back(self, claim: Claim) -> None:
        error = {"type": "internal_error", "message": "worker stopped", "code": None}
        self.fail(claim, error, retry=True, counts=False)

    def _records(self, claim: Claim, used: Record) -> tuple[Record, Record]:
        """Usage and notes of an attempt that is over."""
        now = time.monotonic_ns()
        claimed = self._claimed_ns.pop(claim.job_id, now)
        queued = claimed - (claim.claimed_ms - claim.since_ms) * 1_000_000
        start_ms = max(0, self._ready_at - max(self._started_at, queued)) / 1e6
        spans = self._before_run(queued, claimed) + self.run_phases(claim, claimed) + [phase("run", claimed, now)]
        notes = {"host": self.host.id, "replica": self.id, "isolation": self.isolation, "since_ms": claim.since_ms}
        return self._usage(claim, used, now - claimed, start_ms), {**notes, "timeline": spans}

    def _usage(self, claim: Claim, used: Record, ran_ns: int, cold_start_ms: float) -> Record:
        """`busy_ms` is its share of the replica's time; its start is on the record of the first attempt that ends here,
        `cold_start_ms` says how long this job waited for it."""
        start_ms, self._untold_start_ms = self._untold_start_ms, 0.0
        return {
            "tenant": claim.tenant,
            "function": claim.function,
            "attempt": claim.attempt,
            "queue_ms": claim.claimed_ms - claim.since_ms,
            "run_ms": ran_ns / 1e6,
            "busy_ms": self._share.end(claim.job_id) * 1000,
            "start_ms": start_ms,
            "cold_start_ms": cold_start_ms,
            "prompt_tokens": 0,
            "completion_tokens": 0,
            "cached_tokens": 0,
            **used,
        }

    def _before_run(self, queued: int, claimed: int) -> list[Record]:
        if self._ready_at <= queued:
            return waiting(queued, claimed)
        return waiting_for_start(queued, self._started_at, self._ready_at, claimed, self.timeline.records())
