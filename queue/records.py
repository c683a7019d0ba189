"""Wire records: what producers, workers and readers hand to the broker and get back, and the codec of payloads."""

import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import lru_cache
from typing import Any, Literal, NamedTuple, cast

import msgpack

CODEC_VERSION = 1
# From here on, a view costs less than a copy.
BIG_BYTES = 16_384
VERSION_BYTE = bytes((CODEC_VERSION,))
PRIORITIES = (0, 1, 2)

CROCKFORD = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
ULID_LENGTH = 26
TIME_DIGITS = 10
RANDOM_DIGITS = ULID_LENGTH - TIME_DIGITS
IDS_AT_ONCE = 256
DIGIT_OF_BYTE = (CROCKFORD * 8).encode()
RANDOM: list[str] = []
# A child would make its parent's ids once more.
os.register_at_fork(after_in_child=RANDOM.clear)


class RecordVersionError(ValueError):
    """The bytes were packed by a version of stoker that this one can't read."""


class QueueFull(Exception):
    """Refused: `limit` names what is full; a client does best to come back after `retry_after_s` seconds."""

    def __init__(self, message: str, *, limit: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.message = message
        self.limit = limit
        self.retry_after_s = retry_after_s


class IdempotencyMismatch(Exception):
    """The idempotency key was used before, for a different request."""


class NotReplayable(Exception):
    """Only a dead or a failed job can be replayed; this one's `state` is another."""

    def __init__(self, job_id: str, state: "JobState") -> None:
        super().__init__(f"job {job_id} is {state}; only a dead or a failed job can be replayed")
        self.state = state


def pack(value: Any) -> bytes:
    """One version byte, then msgpack."""
    return VERSION_BYTE + cast(bytes, msgpack.packb(value))


def unpack(data: bytes) -> Any:
    """Raises RecordVersionError for empty data or an unknown version byte."""
    if data[:1] != VERSION_BYTE:
        found = data[0] if data else "no"
        raise RecordVersionError(f"record has version byte {found}, this stoker reads {CODEC_VERSION}")
    return msgpack.unpackb(data[1:] if len(data) < BIG_BYTES else memoryview(data)[1:], strict_map_key=False)


def new_job_id(function: str) -> str:
    """`function` and a ULID: 48 bits of wall-clock milliseconds, then 80 random bits, in Crockford's base 32."""
    return f"{function}-{time_digits(time.time_ns() // 1_000_000)}{random_digits()}"


@lru_cache(1)
def time_digits(milliseconds: int) -> str:
    return "".join([CROCKFORD[milliseconds >> 5 * place & 31] for place in reversed(range(TIME_DIGITS))])


def random_digits() -> str:
    """80 bits. One operating system call brings those of many ids."""
    try:
        return RANDOM.pop()
    except IndexError:
        text = os.urandom(IDS_AT_ONCE * RANDOM_DIGITS).translate(DIGIT_OF_BYTE).decode()
        RANDOM.extend(text[at : at + RANDOM_DIGITS] for at in range(0, len(text), RANDOM_DIGITS))
        return RANDOM.pop()


def function_of(job_id: str) -> str:
    """Raises ValueError when `job_id` doesn't end in "-" and a ULID."""
    function, _, ulid = job_id.rpartition("-")
    if not function or len(ulid) != ULID_LENGTH or ulid.strip(CROCKFORD):
        raise ValueError(f"{job_id!r} is not a job id")
    return function


def made_at_ms(job_id: str) -> int:
    """When a well-formed job id was made, as its ULID says."""
    number = 0
    for digit in job_id[-ULID_LENGTH:][:TIME_DIGITS]:
        number = number << 5 | CROCKFORD.index(digit)
    return number


class JobState(StrEnum):
    """QUEUED and RETRYING wait (in a lane or for their delay); the six after RUNNING are terminal.

    EXPIRED: a clock ran out before a worker had it; TIMED_OUT: while a worker had it. DEAD: every attempt was used up.
    """

    QUEUED = "queued"
    RETRYING = "retrying"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    TIMED_OUT = "timed_out"
    DEAD = "dead"

    @property
    def terminal(self) -> bool:
        return self not in (JobState.QUEUED, JobState.RETRYING, JobState.RUNNING)


class Settled(StrEnum):
    """What became of a settled attempt. DONE: the job is over (also after a failure that is not retried)."""

    DONE = "done"
    RETRYING = "retrying"
    DEAD = "dead"
    STALE = "stale"


@dataclass(slots=True, kw_only=True)
class NewJob:
    """A job to enqueue. `priority`: 0 urgent, 1 normal, 2 batch. `cost` is the estimate in fairness units. A tenant of
    `weight` 3 is served three times as much as one of weight 1; its last job's holds for all of them.

    Only jobs with equal `batch_key` are claimed together. `stream`: chunks are kept for resume. `gateway` receives the
    events. Three separate clocks, 0 = none: `start_within_ms` (first claim), `run_within_ms` (each attempt),
    `finish_within_ms` (everything). `retention_ms` counts from the terminal state, of which the URL `webhook` is told.
    `route` is kept with the record as it is, and so is `caller`, the job whose code made this one.
    """

    id: str
    function: str
    tenant: str
    payload: bytes
    priority: int = 1
    cost: float = 1.0
    weight: float = 1.0
    batch_key: str = ""
    max_attempts: int = 3
    stream: bool = False
    gateway: str = ""
    idempotency_key: str = ""
    request_digest: bytes = b""
    start_within_ms: int = 0
    run_within_ms: int = 0
    finish_within_ms: int = 0
    retention_ms: int = 3_600_000
    delay_ms: int = 0
    webhook: str = ""
    route: bytes = b""
    caller: str = ""

    def __post_init__(self) -> None:
        if function_of(self.id) != self.function:
            raise ValueError(f"job id {self.id!r} belongs to another function than {self.function!r}")
        if self.priority not in PRIORITIES:
            raise ValueError(f"priority must be 0, 1 or 2, not {self.priority}")
        if "," in self.gateway:
            raise ValueError(f"a gateway id has no comma: {self.gateway!r}")
        if self.max_attempts < 1 or self.retention_ms < 1:
            raise ValueError("max_attempts and retention_ms must be at least 1")
        if not 0 <= self.cost < float("inf"):
            raise ValueError(f"cost must be a finite number of at least 0, not {self.cost}")
        if not 0 < self.weight < float("inf"):
            raise ValueError(f"weight must be a finite number above 0, not {self.weight}")
        if min(self.start_within_ms, self.run_within_ms, self.finish_within_ms, self.delay_ms) < 0:
            raise ValueError("clocks and delay must be 0 or more milliseconds")


@dataclass(frozen=True, slots=True)
class Enqueued:
    """`created` is False for an idempotent replay; `wake`: this was the first item of an empty backlog."""

    job_id: str
    created: bool
    wake: bool
    queued: int
    state: JobState


@dataclass(frozen=True, slots=True)
class Limits:
    """Per function, and the same for each of its tenants; 0 = none. Delayed jobs count as queued.

    A tenant whose running jobs are at their limit is passed over, others go on. What comes per minute may come at once,
    and refills steadily; cost is a job's estimate, in fairness units.
    """

    max_queued: int = 100_000
    max_queued_per_tenant: int = 0
    max_running: int = 0
    max_running_per_tenant: int = 0
    requests_per_minute: float = 0
    requests_per_minute_per_tenant: float = 0
    cost_per_minute: float = 0
    cost_per_minute_per_tenant: float = 0

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not 0 <= value < float("inf"):
                raise ValueError(f"{name} must be a finite number of at least 0, not {value}")


@dataclass(frozen=True, slots=True)
class StoredChunk:
    """One kept chunk; `id` is its Redis stream id."""

    id: str
    fence: int
    attempt: int
    data: bytes


class Claim(NamedTuple):
    """A job handed to a worker, for which it waited since `since_ms`. `chunks` is what earlier attempts already emitted
    (stream jobs only). `weight` is its tenant's."""

    job_id: str
    function: str
    tenant: str
    payload: bytes
    fence: int
    attempt: int
    max_attempts: int
    stream: bool
    gateway: str
    since_ms: int
    claimed_ms: int
    run_within_ms: int
    chunks: list[StoredChunk]
    priority: int = 1
    weight: float = 1.0


class Emission(NamedTuple):
    """One chunk of output. `seq` rises from 1 in each attempt, which makes a replay harmless.

    `cost` is what the attempt has cost so far, in fairness units ("": not said now); beyond the estimate it counts at
    once. With a cost, there may be no data; then `seq` is that of the last chunk.
    """

    job_id: str
    fence: int
    seq: int
    data: bytes
    cost: float | Literal[""] = ""


class Completion(NamedTuple):
    """A successful attempt; `cost` is the actual cost in fairness units (None: as estimated)."""

    job_id: str
    fence: int
    result: bytes
    usage: bytes
    notes: bytes = b""
    cost: float | None = None


@dataclass(frozen=True, slots=True)
class Failure:
    """A failed attempt. `counts=False` hands it back to the head of its lane without using up the attempt."""

    job_id: str
    fence: int
    error: bytes
    retry: bool
    counts: bool = True
    usage: bytes = b""
    notes: bytes = b""


@dataclass(frozen=True, slots=True)
class Metered:
    """What an attempt had used when it was stopped from outside: its job was cancelled or ran out of time."""

    job_id: str
    fence: int
    usage: bytes


@dataclass(frozen=True, slots=True)
class Attempt:
    """One claim that was not the job's last: `how` it ended is "lost", "failed" or "handed_back"."""

    number: int
    worker: str
    began_ms: int
    ended_ms: int
    how: str
    usage: bytes | None
    error: bytes | None


@dataclass(frozen=True, slots=True)
class Job:
    """A job's record as a reader sees it. `reason` says in words why it ended without a worker's verdict; `metered`:
    `usage` is what it had used when it was stopped from outside; `aside`: it is queued with a worker, which keeps it
    for another one."""

    id: str
    function: str
    tenant: str
    state: JobState
    attempt: int
    max_attempts: int
    priority: int
    stream: bool
    enqueued_ms: int
    started_ms: int | None
    finished_ms: int | None
    worker: str
    reason: str
    error: bytes | None
    result: bytes | None
    usage: bytes | None
    notes: bytes | None
    queued_ahead: int | None
    webhook: str = ""
    route: bytes = b""
    past_attempts: Sequence[Attempt] = ()
    metered: bool = False
    aside: bool = False
    caller: str = ""


@dataclass(frozen=True, slots=True)
class Backlog:
    """What a scaler needs to know about a function; ages in milliseconds, rates are moving averages per second.
    `drained_last_per_s` is the rate at the time when a job ended last; `cold_start_ms` None: never measured."""

    function: str
    queued: int
    running: int
    delayed: int
    oldest_ms: int
    drained_per_s: float
    arrived_per_s: float
    last_active_ms: int
    drained_last_per_s: float = 0.0
    cold_start_ms: int | None = None
