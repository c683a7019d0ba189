"""How a job ended, whether it was told by its last event or read from its record."""

from dataclasses import dataclass, field
from typing import Any

from stoker.queue.events import Ending
from stoker.queue.records import Job, JobState, unpack
from stoker.runtime.error_record import bounded
from stoker.runtime.gateway.errors import ApiError, job_failed

UNJUDGED = {JobState.CANCELLED, JobState.EXPIRED, JobState.TIMED_OUT}


@dataclass(frozen=True, slots=True)
class Outcome:
    """`result` and `error` are the worker's maps; one of them is None. `size` is the packed result's, in bytes."""

    state: JobState
    result: dict[str, Any] | None
    error: dict[str, Any] | None
    usage: dict[str, Any] = field(default_factory=dict)
    size: int = 0

    def value(self) -> dict[str, Any]:
        """The result; raises what the waiting client is answered when there is none."""
        if self.state is not JobState.SUCCEEDED or self.result is None:
            raise self.failure()
        return self.result

    def failure(self) -> ApiError:
        return job_failed(self.state, self.error)


def outcome_of_job(job: Job) -> Outcome:
    return outcome_of(job.state, job.result, job.error, job.usage, job.reason)


def outcome_of_end(state: JobState | None, ending: Ending) -> Outcome:
    return outcome_of(state or JobState.FAILED, ending.result, ending.error, ending.usage, ending.reason)


def outcome_of(state: JobState, result: bytes | None, error: bytes | None, usage: bytes | None, reason: str) -> Outcome:
    """`reason` stands for the error of a job that ended without a worker's verdict on its last attempt."""
    judged = unpacked(error) if state not in UNJUDGED else None
    said = judged or ({"message": reason} if reason else None)
    shown = bounded(said) if said else None
    return Outcome(state, unpacked(result), shown, unpacked(usage) or {}, len(result or b""))


def unpacked(data: bytes | None) -> Any:
    return unpack(data) if data else None
