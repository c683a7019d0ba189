"""A batch: a file of requests that run when there is room, within a day. Its life as pure steps between records."""

import re
import secrets
import time
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

Status = Literal["validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"]
OVER: tuple[Status, ...] = ("failed", "completed", "expired", "cancelled")
WINDOW_S = 86_400
MAX_LINES = 50_000
BATCH_ID = re.compile(r"batch_[a-z0-9]{1,64}")


@dataclass(frozen=True, slots=True)
class Batch:
    """`segments_done` stretches of lines have their results in the store, and `completed` and `failed` count those;
    `seen_completed` and `seen_failed` count all that ended, as of a moment ago. `stopped` says why some lines were not
    run. Times are Unix seconds, 0 = not yet."""

    id: str
    tenant: str
    endpoint: str
    input_file_id: str
    created_at: int
    expires_at: int
    status: Status = "validating"
    metadata: dict[str, str] = field(default_factory=dict)
    errors: list[dict[str, Any]] = field(default_factory=list)
    output_file_id: str = ""
    error_file_id: str = ""
    total: int = 0
    completed: int = 0
    failed: int = 0
    seen_completed: int = 0
    seen_failed: int = 0
    segments_done: int = 0
    stopped: str = ""
    in_progress_at: int = 0
    finalizing_at: int = 0
    completed_at: int = 0
    failed_at: int = 0
    expired_at: int = 0
    cancelling_at: int = 0
    cancelled_at: int = 0

    @property
    def over(self) -> bool:
        return self.status in OVER

    @property
    def counts(self) -> tuple[int, int]:
        """Lines that completed and lines that failed. They don't fall while lines are run, whatever a line's end is
        when another gateway asks for it again; in the end they are those of the files."""
        stored, seen = (self.completed, self.failed), (self.seen_completed, self.seen_failed)
        return stored if self.finalizing_at or no_less(stored, seen) else seen

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def no_less(counts: tuple[int, int], others: tuple[int, int]) -> bool:
    return counts[0] >= others[0] and counts[1] >= others[1]


def new_batch(tenant: str, endpoint: str, input_file_id: str, metadata: dict[str, str]) -> Batch:
    now = int(time.time())
    batch_id = f"batch_{time.time_ns() // 1_000_000:012x}{secrets.token_hex(6)}"
    return Batch(batch_id, tenant, endpoint, input_file_id, now, now + WINDOW_S, metadata=metadata)


def started(batch: Batch, total: int, now: int) -> Batch:
    if batch.status != "validating":
        return replace(batch, total=total)
    return replace(batch, status="in_progress", total=total, in_progress_at=now)


def refused(batch: Batch, code: str, message: str, now: int) -> Batch:
    """Of an input that can't be read, or not any more. Results that are stored, if any may be, become files first."""
    error = {"code": code, "message": message, "param": None, "line": None}
    if batch.status != "validating":
        return replace(batch, errors=[error])
    return replace(batch, status="failed", failed_at=now, errors=[error])


def advanced(batch: Batch, completed: int, failed: int, stopped: str) -> Batch:
    """One more segment of results is stored."""
    return replace(
        batch,
        segments_done=batch.segments_done + 1,
        completed=batch.completed + completed,
        failed=batch.failed + failed,
        stopped=stopped,
    )


def counted(batch: Batch, completed: int, failed: int) -> Batch:
    """So many lines have ended by now, stored or not."""
    if not no_less((completed, failed), (batch.seen_completed, batch.seen_failed)):
        return batch
    return replace(batch, seen_completed=completed, seen_failed=failed)


def cancelled(batch: Batch, now: int) -> Batch:
    """Asked for; what runs is stopped, and what is there is written."""
    return (
        batch if batch.over or batch.status == "cancelling" else replace(batch, status="cancelling", cancelling_at=now)
    )


def stop_reason(batch: Batch, now: float) -> str:
    """Why no further line is run, "" while they are."""
    if batch.status == "cancelling":
        return "batch_cancelled"
    return "batch_expired" if now >= batch.expires_at else ""


def finalizing(batch: Batch, now: int) -> Batch:
    """The results become files."""
    at = replace(batch, finalizing_at=batch.finalizing_at or now)
    return at if batch.status == "cancelling" else replace(at, status="finalizing")


def finished(batch: Batch, output: str, errors: str, now: int) -> Batch:
    """`output` and `errors` are file ids, "" for a file that would be empty."""
    files = replace(batch, output_file_id=output, error_file_id=errors)
    if batch.status == "cancelling":
        return replace(files, status="cancelled", cancelled_at=now)
    if batch.errors:
        return replace(files, status="failed", failed_at=now)
    if batch.stopped == "batch_expired":
        return replace(files, status="expired", expired_at=now)
    return replace(files, status="completed", completed_at=now)
