"""Errors as clients see them: always {"error": {message, type, param, code}}, with OpenAI's statuses and types."""

import math
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError
from typing_extensions import TypedDict

from stoker.queue.records import JobState

Headers = dict[str, str]

NO_RETRY: Headers = {"x-should-retry": "false"}
"""The OpenAI clients repeat 409 and 5xx by themselves unless the answer says that it won't help."""

VERSION_CHANGED = "version_changed"
"""A job's: it was made for a version that is no longer there. Made again it fits."""

WORKER_STATUS = {
    "invalid_request_error": 400,
    "out_of_memory": 503,
    "cold_start_error": 503,
    "timeout_error": 504,
}
STATE_STATUS = {JobState.CANCELLED: 499, JobState.EXPIRED: 504, JobState.TIMED_OUT: 504}
STATE_ERROR = {
    JobState.CANCELLED: ("cancelled_error", "job_cancelled", "the job was cancelled before it finished"),
    JobState.EXPIRED: ("timeout_error", "expired_before_start", "the job did not start in time"),
    JobState.TIMED_OUT: ("timeout_error", "timed_out", "the job ran longer than its limit"),
    JobState.DEAD: ("internal_error", "attempts_exhausted", "every attempt of the job was lost with its worker"),
}


class ErrorObject(TypedDict):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(TypedDict):
    error: ErrorObject


class ApiError(Exception):
    """A request that ends with `status` and one error object; raised anywhere below a handler."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type
        self.code = code
        self.param = param
        self.headers = dict(headers or {})
        if status == 503:
            self.headers.setdefault("retry-after", "1")

    @property
    def error(self) -> ErrorObject:
        return {"message": self.message, "type": self.type, "param": self.param, "code": self.code}

    def body(self) -> ErrorBody:
        return {"error": self.error}


def bad_request(message: str, *, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code)


def not_found(message: str, *, code: str = "not_found", param: str | None = None) -> ApiError:
    return ApiError(404, message, code=code, param=param)


def function_not_found(name: str, param: str | None = None) -> ApiError:
    return not_found(f"The model or function '{name}' does not exist.", code="model_not_found", param=param)


def not_replayable(job_id: str, state: JobState) -> ApiError:
    """Of other ends the queue keeps no input."""
    message = f"Job '{job_id}' is {state}; only a dead or a failed job can be replayed."
    if state.terminal:
        message += " Its input is no longer kept: send that again as a new job"
        ran_out = state in (JobState.TIMED_OUT, JobState.EXPIRED)
        message += ", once the function's time limit is as long as it needs." if ran_out else "."
    return ApiError(409, message, code="job_not_replayable", param="id", headers=NO_RETRY)


def too_large(limit: int) -> ApiError:
    return ApiError(
        413,
        f"The request body is larger than the limit of {limit} bytes.",
        code="request_too_large",
        headers={"connection": "close"},
    )


def queue_unavailable() -> ApiError:
    return ApiError(
        503,
        "The request queue can't be reached at the moment; try again.",
        type="server_error",
        code="queue_unavailable",
    )


def gateway_stopping() -> ApiError:
    message = "The gateway stops, and has queued nothing; try again."
    return ApiError(503, message, type="server_error", code="gateway_stopping")


def store_unavailable(message: str) -> ApiError:
    return ApiError(503, message, type="server_error", code="store_unavailable")


def queue_full(message: str, retry_after_s: float) -> ApiError:
    headers = {"retry-after": str(max(1, math.ceil(retry_after_s)))}
    return ApiError(429, message, type="rate_limit_exceeded", code="rate_limit_exceeded", headers=headers)


def internal_error(request_id: str) -> ApiError:
    message = f"The gateway failed to handle the request. Its log has the details under request id {request_id}."
    return ApiError(500, message, type="server_error", code="internal_error")


def invalid_fields(error: ValidationError, *prefix: str) -> ApiError:
    """Pydantic's most specific complaint, with the field's path (after `prefix`) as `param`. A union's branches of
    another type altogether say least."""
    problems = error.errors(include_url=False, include_context=False, include_input=False)
    problem = max(problems, key=lambda problem: (len(problem["loc"]), not problem["type"].endswith("_type")))
    path = [*prefix, *(part for part in problem["loc"] if not is_union_branch(part))]
    param = ".".join(str(part) for part in path) or None
    message = problem["msg"].removeprefix("Value error, ")
    return bad_request(f"Invalid value for '{param}': {message}." if param else message, param=param)


def is_union_branch(part: int | str) -> bool:
    """Pydantic puts the tried branch of a union ("list[str]", "constrained-str") into the path, unknown to clients."""
    return isinstance(part, str) and (part in ("str", "int") or "[" in part or "constrained" in part)


def job_failed(state: JobState | None, error: Mapping[str, Any] | None) -> ApiError:
    """How a job that ended without a result is answered to the client that waits for it."""
    kind, code, message = STATE_ERROR.get(state, ("internal_error", None, "the job failed")) if state else FAILED
    if error:
        kind, message = str(error.get("type") or kind), str(error.get("message") or message)
        code = error.get("code") or code
    if code == VERSION_CHANGED:
        return ApiError(503, message, type=kind, code=code, headers={"retry-after": "1"})
    status = STATE_STATUS.get(state) if state else None
    status = status or (422 if code == "invalid_input" else WORKER_STATUS.get(kind, 500))
    return ApiError(status, message, type=kind, code=code, param=(error or {}).get("param"), headers=NO_RETRY)


FAILED = ("internal_error", None, "the job failed")
