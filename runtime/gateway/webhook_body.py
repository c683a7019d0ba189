"""What a webhook says: `{"type": "job.succeeded", "timestamp": …, "data": the job's object}`, in less than 20 kB."""

from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from stoker.queue.deliveries import Delivery
from stoker.queue.records import Job, function_of
from stoker.runtime import payloads
from stoker.runtime.gateway.job_object import job_object, links
from stoker.runtime.gateway.sse import json_bytes
from stoker.runtime.spec import short_name

MOST_BYTES = 20_000
MOST_MESSAGE = 1000


def event_type(delivery: Delivery) -> str:
    return f"job.{delivery.state}"


def event_body(delivery: Delivery, job: Job | None, cost_usd: float | None) -> bytes:
    """`job` as its record is now. What has no room is left out: the result first (`result_omitted`), then the rest."""
    whole = event(delivery, job_data(delivery, job, cost_usd))
    data = whole["data"]
    if len(packed := json_bytes(whole)) < MOST_BYTES:
        return packed
    data |= {"result": None, "result_omitted": True}
    if len(packed := json_bytes(whole)) < MOST_BYTES:
        return packed
    data |= {"timeline": [], "attempts": [], "error": shortened(data["error"])}
    return json_bytes(whole)


def event(delivery: Delivery, data: dict[str, Any]) -> dict[str, Any]:
    moment = datetime.fromtimestamp(delivery.ended_ms / 1000, UTC).isoformat(timespec="milliseconds")
    return {"type": event_type(delivery), "timestamp": moment, "data": data}


def job_data(delivery: Delivery, job: Job | None, cost_usd: float | None) -> dict[str, Any]:
    """A result in the object store is not fetched: it has no room anyway."""
    if job is None or job.finished_ms != delivery.ended_ms:
        return bare_data(delivery)
    stored = job.result is not None and payloads.is_reference(job.result)
    shown = job_object(replace(job, result=None) if stored else job, cost_usd=cost_usd)
    return {**shown, "result_omitted": stored}


def bare_data(delivery: Delivery) -> dict[str, Any]:
    """Of an end whose record is no longer kept, or tells of a later one."""
    return {
        "id": delivery.job_id,
        "object": "job",
        "function": short_name(function_of(delivery.job_id)),
        "state": delivery.state,
        "finished_at": delivery.ended_ms / 1000,
        "error": None,
        "result": None,
        "result_omitted": True,
        "links": links(delivery.job_id),
    }


def shortened(error: Mapping[str, Any] | None) -> dict[str, Any] | None:
    return {**error, "message": error["message"][:MOST_MESSAGE], "traceback": None} if error else None
