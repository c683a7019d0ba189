"""Requests and answers on the wire: an input as a body, an answer as a value or an error."""

import math
import os
import re
import uuid
from typing import Any

import httpx

from stoker.runtime.client.errors import BadUrl, JobFailed, StokerError
from stoker.runtime.client.media import JSON, MSGPACK, encoded, unpacked
from stoker.runtime.client.paths import function_path
from stoker.runtime.current_job import CALLER, calling_job

DEFAULT_URL = "http://127.0.0.1:8000"
SCHEMES = ("http://", "https://")
WAIT_S = 20.0
ANSWER_S = 20.0
# Bytes and arrays come as such.
ACCEPT = f"{MSGPACK}, {JSON};q=0.9"
EVENT_STREAM = {"accept": f"text/event-stream, {MSGPACK}"}
OWN_ID = re.compile(r"[A-Za-z0-9._~-]+")
OWN_ID_MOST = 128
# A map's own end with the number of an input.
MAP_KEY_MOST = 100
IDEMPOTENCY_KEY = re.compile(r"[!-~]([ -~]{0,253}[!-~])?")
REPLAYABLE = ("failed", "dead")


def connection(url: str, api_key: str, timeout: float) -> dict[str, Any]:
    """How either kind of httpx client is made; what is left out comes from STOKER_URL and STOKER_API_KEY."""
    key = api_key or os.environ.get("STOKER_API_KEY", "")
    return {
        "base_url": base_url(url or os.environ.get("STOKER_URL", DEFAULT_URL)),
        "headers": {"accept": ACCEPT} | ({"authorization": f"Bearer {key}"} if key else {}),
        "timeout": timeout,
        # A big result may lie in a bucket.
        "follow_redirects": True,
        "limits": httpx.Limits(max_connections=None),
    }


def base_url(url: str) -> str:
    """A /v1 at its end, as OpenAI's clients have it there, is left out. Raises BadUrl."""
    if not url.lower().startswith(SCHEMES):
        raise BadUrl(f"the gateway's URL needs http:// or https://: {url!r}")
    return url.rstrip("/").removesuffix("/v1")


def checked_jobs(jobs: tuple[Any, ...], kind: type) -> None:
    """Raises TypeError for what `gather` can't wait for."""
    for job in jobs:
        if not isinstance(job, kind):
            raise TypeError(
                f"gather takes the jobs that spawn returned, one by one, gather(*jobs) with {kind.__name__} objects, "
                f"not {type(job).__name__}"
            )


def body_of(value: Any, key: str = "") -> dict[str, Any]:
    """Raises InvalidInput for what can't be sent, ValueError for such a key."""
    if key and not IDEMPOTENCY_KEY.fullmatch(key):
        raise ValueError(f"an idempotency key is 1 to 255 printable ASCII characters, not {key!r}")
    content, media = encoded(value)
    headers = {"content-type": media, "idempotency-key": key, CALLER: calling_job()}
    return {"content": content, "headers": {name: value for name, value in headers.items() if value}}


def job_body(value: Any, webhook: str) -> dict[str, Any]:
    options = body_of(value)
    return {**options, "headers": options["headers"] | ({"webhook-url": webhook} if webhook else {})}


def waiting(wait_s: float, **options: Any) -> dict[str, Any]:
    """The options of a request that is answered when its job has ended, or after `wait_s`."""
    headers = {**options.get("headers", {}), "prefer": f"wait={wait_s:.3f}"}
    return {**options, "headers": headers, "timeout": wait_s + ANSWER_S}


def new_id() -> str:
    return uuid.uuid4().hex


def own_job(function: str, own_id: str) -> str:
    """The path of a job under the caller's own id: however often it is put there, it runs once. Raises ValueError."""
    return f"{function_path(function)}/jobs/{checked_key(own_id)}"


def checked_key(key: str, most: int = OWN_ID_MOST) -> str:
    """Raises ValueError for what is none. Dots alone would be lost on the way, as parts of a path."""
    if OWN_ID.fullmatch(key) and len(key) <= most and key not in (".", ".."):
        return key
    allowed = "the letters a-z and A-Z, digits, '.', '_', '~' and '-' (but not '.' or '..' alone)"
    raise ValueError(f"a key is 1 to {most} of {allowed}, not {key!r}")


def has_ended(record: dict[str, Any]) -> bool:
    return record.get("finished_at") is not None


def result_of(record: dict[str, Any]) -> Any:
    """Of a job that has ended. Raises JobFailed."""
    if record["state"] != "succeeded":
        raise JobFailed(record)
    return record["result"]


def failure_of(record: dict[str, Any], told: StokerError) -> StokerError:
    """What a request that was answered with an error raises: its job's failure, or else the gateway's own."""
    return JobFailed(record) if has_ended(record) and record["state"] != "succeeded" else told


def is_left_over(answer: httpx.Response, record: dict[str, Any]) -> bool:
    """Whether a job that was put had been there before, and has ended without a result that it can still have."""
    return answer.headers.get("idempotency-replayed") == "true" and record["state"] in REPLAYABLE


def decoded(response: httpx.Response) -> Any:
    raise_for_error(response)
    if response.headers.get("content-type") == MSGPACK:
        return unpacked(response.content)
    return response.json() if response.content else None


def raise_for_error(response: httpx.Response) -> None:
    if response.is_error:
        try:
            error = response.json()["error"]
        except (ValueError, KeyError, TypeError):
            error = {"message": f"HTTP {response.status_code}: {response.text[:200]}"}
        headers = response.headers
        final = headers.get("x-should-retry") == "false"
        raise StokerError(response.status_code, error, headers.get("x-job-id", ""), retry_after_s(headers), final)


def retry_after_s(headers: httpx.Headers) -> float | None:
    try:
        seconds = float(headers.get("retry-after", ""))
    except ValueError:
        return None
    return seconds if math.isfinite(seconds) and seconds >= 0 else None
