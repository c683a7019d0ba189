"""One loaded copy of a function on this host: what all kinds share. The kinds say how to load, run and abort."""

import asyncio
import contextlib
import logging
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from stoker.coldstart.failures import ColdStartError, StoreUnavailable
from stoker.coldstart.timeline import Timeline
from stoker.queue.records import Claim, Completion, Failure, Metered, pack
from stoker.queue.retry import insist
from stoker.runtime import payloads
from stoker.runtime.spec import FunctionSpec
from stoker.runtime.worker.busy_share import BusyShare
from stoker.runtime.worker.host import PATIENCE_S, Host
from stoker.runtime.worker.outbox import Outbox

State = Literal["starting", "loading", "ready", "draining", "failed", "gone"]
Record = dict[str, Any]

MANY_FAILURES = 3
DRAIN_LOOK_S = 0.02

log = logging.getLogger("stoker.worker")


class StartFailed(Exception):
    """A replica could not start; `error` is the record its waiting jobs get."""

    def __init__(self, error: Record) -> None:
        super().__init__(error["message"])
        self.error = error


@dataclass(frozen=True, slots=True)
class Start:
    """Why a replica is started: how many of its version failed to start before it, in a row; and whether it is to
    relieve another version, which serves on, or is woken, should this start fail."""

    failed_before: int = 0
    relieves: bool = False


class Replica(ABC):
    """Life: starting, loading, ready, draining, gone; or failed, and then the controller decides what comes next."""

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
        self._claimed_ns: dict[str, int] = {}
        self._share = BusyShare()
        self._untold_start_ms = 0.0
        self._ready_at = 0.0
        self._grace_ends = math.inf
        self._started_at = time.monotonic_ns()
        self._room = asyncio.Event()
        self._storing: set[asyncio.Task[None]] = set()
        self._stopping = asyncio.Event()
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

    def used(self, job_id: str) -> Record:
        """What a job has used so far beside time, where the kind knows it."""
        return {}

    def run_phases(self, claim: Claim) -> list[Record]:
        """Timeline records of the job's own run, when the kind knows more than its whole length."""
        return []

    def progress(self) -> tuple[int, int]:
        """Bytes loaded and bytes in all."""
        return 0, 0

    def settled(self) -> bool:
        """Whether nothing of the start can fail any more, once the replica is ready."""
        return True

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
        if claim := self.held.pop(job_id, None):
            self.outbox.meter(Metered(job_id, claim.fence, pack(self._usage(claim, self.used(job_id)))))
            self.outbox.forget(job_id)
            self._claimed_ns.pop(job_id, None)
            self.abort(job_id)
            self._room.set()

    def crash(self, error: Record) -> None:
        """What ran the jobs died: they are retried elsewhere and this replica is over."""
        if self.state in ("failed", "gone"):
            return
        self.state, self.error = "failed", error
        for claim in list(self.held.values()):
            self.fail(claim, error, retry=True)
        self._stopping.set()
        self._room.set()

    def complete(self, claim: Claim, result: Record, usage: Record, cost: float | None = None) -> None:
        """A big result is stored first; until then the job is held."""
        packed = pack(result)
        if len(packed) <= payloads.INLINE_LIMIT:
            self._complete(claim, packed, usage, cost)
            return
        storing = asyncio.create_task(self._store(claim, packed, usage, cost))
        self._storing.add(storing)
        storing.add_done_callback(self._storing.discard)

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
        self.outbox.complete(
            Completion(
                job_id=claim.job_id,
                fence=claim.fence,
                result=packed,
                usage=pack(self._usage(claim, usage)),
                notes=pack(self._notes(claim)),
                cost=cost,
            )
        )

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
        self.outbox.fail(
            Failure(
                job_id=claim.job_id,
                fence=claim.fence,
                error=pack(error),
                retry=retry,
                counts=counts,
                usage=pack(self._usage(claim, {})),
                notes=pack(self._notes(claim)),
            )
        )

    def hold(self, claim: Claim) -> None:
        self.held[claim.job_id] = claim
        self._claimed_ns[claim.job_id] = time.monotonic_ns()
        self._share.begin(claim.job_id)

    async def room(self) -> int:
        """Waits until there is room for a job; 0: the replica stops."""
        while not self._stopping.is_set():
            if free := self.free():
                return free
            self._room.clear()
            await self._room.wait()
        return 0

    async def claim(self, limit: int) -> list[Claim]:
        """Up to `limit` jobs, as `take` gives them; [] after a moment without any."""
        claims = await insist(lambda: self.claimer.claim_or_stand(limit), PATIENCE_S)
        return await self.take(claims or await self.claimer.wait())

    async def claim_now(self, limit: int) -> list[Claim]:
        return await self.take(await insist(lambda: self.claimer.claim(limit), PATIENCE_S))

    async def take(self, claims: Sequence[Claim]) -> list[Claim]:
        """Holds them, so that their leases are renewed, and reads their payloads, wherever those are; a job whose
        payload can't be read is failed here."""
        for claim in claims:
            self.hold(claim)
        await asyncio.gather(*(self._read_payload(claim) for claim in claims if payloads.is_reference(claim.payload)))
        return [self.held[claim.job_id] for claim in claims if claim.job_id in self.held]

    async def _read_payload(self, claim: Claim) -> None:
        try:
            payload = await asyncio.to_thread(payloads.get, self.host.store, claim.job_id, claim.payload)
        except ColdStartError as error:
            self.fail(claim, store_record(error), retry=isinstance(error, StoreUnavailable))
        else:
            if self.held.get(claim.job_id) is claim:
                self.held[claim.job_id] = replace(claim, payload=payload)

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
        try:
            await self._load()
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
            if self.state != "failed":
                self.state = "gone"

    async def _load(self) -> None:
        limit_s = self.spec.limits.start_up_within_s
        try:
            async with asyncio.timeout(limit_s or None):
                await self.load()
        except StartFailed:
            raise
        except ColdStartError as error:
            raise StartFailed(cold_start_record(error)) from error
        except TimeoutError as error:
            message = f"the worker was not ready after {limit_s:g} s, the limit of its start"
            raise StartFailed({"type": "timeout_error", "message": message, "code": "start_timed_out"}) from error
        except Exception as error:
            log.exception("replica %s of %s", self.id, self.spec.name)
            message = f"{type(error).__name__}: {error}"
            raise StartFailed({"type": "cold_start_error", "message": message, "code": type(error).__name__}) from error
        self._ready_at = time.monotonic()
        self._untold_start_ms = self._ready_at * 1000 - self._started_at / 1e6
        if self.state in ("starting", "loading"):
            self.state = "ready"

    async def _fail_waiting(self, error: Record) -> None:
        """A load that fails uses up one attempt of every job that waited for it, so that none waits for ever. After
        several failures in a row nobody is made to wait through more of them. Where another version serves, or can be
        woken to, the jobs are left to it."""
        log.error("replica %s of %s failed to start: %s", self.id, self.spec.name, error["message"])
        self.state, self.error = "failed", error
        for claim in list(self.held.values()):
            self.abort(claim.job_id)
            if self._start.relieves:
                self._give_back(claim)
            else:
                self.fail(claim, error, retry=self._start.failed_before + 1 < MANY_FAILURES)
        for claim in [] if self._start.relieves else await insist(lambda: self.claimer.claim(1000), PATIENCE_S):
            self.hold(claim)
            self.fail(claim, error, retry=self._start.failed_before + 1 < MANY_FAILURES)
        await self.outbox.drained()

    async def _tell_cold_start(self) -> None:
        took_ms = round(self._ready_at * 1000 - self._started_at / 1e6)
        await insist(lambda: self.host.broker.set_cold_start(self.spec.name, took_ms), PATIENCE_S)

    async def _leave(self) -> None:
        """What a standing claim got in the last moment goes back at once."""
        for claim in await insist(self.claimer.leave, PATIENCE_S):
            self.hold(claim)
            self._give_back(claim)

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

    def _usage(self, claim: Claim, extra: Record) -> Record:
        """Of an attempt that is over. `busy_ms` is its share of the replica's time; its start is on the record
        of the first attempt that ends here."""
        start_ms, self._untold_start_ms = self._untold_start_ms, 0.0
        claimed = self._claimed_ns.get(claim.job_id, time.monotonic_ns())
        return {
            "tenant": claim.tenant,
            "function": claim.function,
            "attempt": claim.attempt,
            "queue_ms": claim.claimed_ms - claim.enqueued_ms,
            "run_ms": (time.monotonic_ns() - claimed) / 1e6,
            "busy_ms": self._share.end(claim.job_id) * 1000,
            "start_ms": start_ms,
            "cold_start_ms": self._cold_start_ms(claim),
            "prompt_tokens": 0,
            "completion_tokens": 0,
            "cached_tokens": 0,
            **extra,
        }

    def _notes(self, claim: Claim) -> Record:
        claimed = self._claimed_ns.get(claim.job_id, time.monotonic_ns())
        queued = claimed - int((claim.claimed_ms - claim.enqueued_ms) * 1e6)
        own = [{"name": "queue wait", "start_ns": queued, "end_ns": claimed}]
        if self._cold_start_ms(claim):
            own = [{"name": "queue wait", "start_ns": queued, "end_ns": self._started_at}, *self.timeline.records()]
        own += [*self.run_phases(claim), {"name": "run", "start_ns": claimed, "end_ns": time.monotonic_ns()}]
        self._claimed_ns.pop(claim.job_id, None)
        return {"host": self.host.id, "replica": self.id, "timeline": own}

    def _cold_start_ms(self, claim: Claim) -> float:
        """How long of its wait this job spent on this replica's start; 0 for a job that found it ready."""
        waited_s = (claim.claimed_ms - claim.enqueued_ms) / 1000
        since_ready = self._claimed_ns.get(claim.job_id, time.monotonic_ns()) / 1e9 - self._ready_at
        load_s = self._ready_at - self._started_at / 1e9
        return max(0.0, min(load_s, waited_s - since_ready)) * 1000 if self._ready_at else 0.0


def store_record(error: ColdStartError) -> Record:
    return {"type": "internal_error", "message": str(error), "code": type(error).__name__, "traceback": None}


def cold_start_record(error: ColdStartError) -> Record:
    return {"type": "cold_start_error", "message": str(error), "code": type(error).__name__, "facts": error.as_dict()}
