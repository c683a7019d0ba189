"""What a client raises: an input that can't be sent, an error answer, a job without a result, no answer."""

from typing import Any

THE_INPUT = (400, 413, 422)


class InvalidInput(TypeError):
    """An input can't be sent, or doesn't fit the function's parameters."""


class BadUrl(ValueError):
    """What should be a gateway's address is none."""


class BadName(ValueError):
    """Nothing can have that name."""


class StokerError(Exception):
    """The gateway's answer to a request that failed: `status`, OpenAI's `type`, `code` and `param`, and the `job_id` if
    there was a job, with the `traceback` of the function's own code, for who owns it (else ""). `retry_after_s` is None
    unless the gateway asks to come back after so many seconds; `final`: repeating the request won't help."""

    def __init__(
        self,
        status: int,
        error: dict[str, Any],
        job_id: str = "",
        retry_after_s: float | None = None,
        final: bool = False,
    ) -> None:
        super().__init__(error.get("message", f"HTTP {status}"))
        self.job_id = job_id
        self.status = status
        self.type = error.get("type")
        self.code = error.get("code")
        self.param = error.get("param")
        self.traceback: str = error.get("traceback") or ""
        self.retry_after_s = retry_after_s
        self.final = final


class Unreachable(StokerError):
    """No gateway answers at the client's address; `status` is 0."""

    def __init__(self, url: str, why: object, final: bool = False) -> None:
        message = f"no gateway answers at {url} ({why or type(why).__name__})"
        super().__init__(0, {"message": message, "code": "unreachable"}, final=final)


class WaitTimeout(StokerError, TimeoutError):
    """A job had not ended when the caller's own time was over: it goes on, and can be waited for again."""

    def __init__(self, record: dict[str, Any], waited_s: float) -> None:
        message = f"job {record['id']} is still {record['state']} after {round(waited_s, 3):g} s"
        super().__init__(408, {"message": message, "type": "timeout_error", "code": "wait_timeout"}, record["id"])
        self.record = record


class JobFailed(StokerError):
    """A job ended without a result, whoever waited for it in whatever way: `record` is all that is known of it, `state`
    how it ended, `status` 500 for what its own code raised, 499 when it was cancelled, 504 when a time limit passed."""

    def __init__(self, record: dict[str, Any]) -> None:
        error: dict[str, Any] = record["error"] or {"message": f"the job was {record['state']}"}
        super().__init__(error.get("status", 500), error, record["id"], final=True)
        self.record = record
        self.state = record["state"]


def in_words_of_key(error: StokerError, key: str, different: str) -> StokerError:
    """A conflict as who gave the key knows it; other errors as they are."""
    if error.code != "idempotency_key_reused":
        return error
    message = f"key {key!r} was used before with {different}: take another key for other work"
    return StokerError(error.status, {"message": message, "type": error.type, "code": error.code}, final=True)


def is_about_input(error: BaseException) -> bool:
    """Whether an error says something of one input, not of the service."""
    refused = isinstance(error, StokerError) and error.status in THE_INPUT
    return refused or isinstance(error, JobFailed | InvalidInput)
