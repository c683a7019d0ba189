import pytest

from stoker.queue.records import JobState
from stoker.runtime.gateway.errors import job_failed, queue_full
from stoker.runtime.gateway.sse import comment, event, json_bytes

WORKER_ERROR = {"type": "function_error", "message": "boom", "code": "ValueError", "traceback": "File ..."}


@pytest.mark.parametrize(
    ("state", "error", "status", "type", "code"),
    [
        (JobState.FAILED, WORKER_ERROR, 500, "function_error", "ValueError"),
        (JobState.FAILED, {"type": "invalid_request_error", "message": "m"}, 400, "invalid_request_error", None),
        (JobState.FAILED, {"type": "out_of_memory", "message": "m"}, 503, "out_of_memory", None),
        (JobState.FAILED, {"type": "timeout_error", "message": "m"}, 504, "timeout_error", None),
        (JobState.DEAD, {"type": "cold_start_error", "message": "m"}, 503, "cold_start_error", "attempts_exhausted"),
        (JobState.DEAD, None, 500, "internal_error", "attempts_exhausted"),
        (JobState.CANCELLED, {"message": "client disconnected"}, 499, "cancelled_error", "job_cancelled"),
        (JobState.EXPIRED, None, 504, "timeout_error", "expired_before_start"),
        (JobState.TIMED_OUT, None, 504, "timeout_error", "timed_out"),
        (JobState.FAILED, None, 500, "internal_error", None),
    ],
)
def test_failed_jobs(state: JobState, error: dict[str, str] | None, status: int, type: str, code: str | None) -> None:
    answer = job_failed(state, error)
    assert (answer.status, answer.type, answer.code) == (status, type, code)
    assert answer.message == (error or {}).get("message", answer.message) and answer.message
    assert answer.headers["x-should-retry"] == "false"
    assert set(answer.body()["error"]) == {"message", "type", "param", "code"}


def test_a_job_that_a_deployment_overtook_is_to_be_sent_again() -> None:
    answer = job_failed(JobState.FAILED, {"type": "invalid_request_error", "message": "m", "code": "version_changed"})
    assert (answer.status, answer.headers) == (503, {"retry-after": "1"})


@pytest.mark.parametrize(("seconds", "header"), [(0.0, "1"), (0.2, "1"), (1.2, "2"), (60, "60")])
def test_a_full_queue_says_when_to_come_back(seconds: float, header: str) -> None:
    full = queue_full("full", seconds)
    assert (full.status, full.code, full.headers["retry-after"]) == (429, "rate_limit_exceeded", header)


def test_events_are_single_lines() -> None:
    assert event({"a": "x\ny"}, name="n", id="1-0") == b'event: n\nid: 1-0\ndata: {"a":"x\\ny"}\n\n'
    assert comment("loading\n\ndata: forged\r\n43 %") == b": loading data: forged 43 %\n\n"


def test_json_of_what_json_has_no_word_for() -> None:
    assert json_bytes([float("nan"), float("inf"), b"\xff\x00", {1: "a"}]) == b'[null,null,"_wA=",{"1":"a"}]'
