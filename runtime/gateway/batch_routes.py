"""/v1/batches, as OpenAI's clients use it."""

import time
from functools import partial
from typing import Any, Literal

from starlette.responses import Response
from typing_extensions import TypedDict

from stoker.runtime.batches.batch import BATCH_ID, Batch, cancelled, new_batch
from stoker.runtime.batches.file_shelf import FILE_ID
from stoker.runtime.gateway.batch_kinds import KINDS
from stoker.runtime.gateway.endpoint import Endpoint, Incoming, Json
from stoker.runtime.gateway.errors import NO_RETRY, ApiError, bad_request, not_found
from stoker.runtime.gateway.file_routes import PAGES, behind, file_not_found, list_object, stored

PAGE, MOST_PER_PAGE = 20, 100
MOST_METADATA, MOST_KEY, MOST_VALUE = 16, 64, 512
TIMES = (
    "in_progress_at",
    "finalizing_at",
    "completed_at",
    "failed_at",
    "expired_at",
    "cancelling_at",
    "cancelled_at",
)


class BatchRequestBody(TypedDict, total=False):
    input_file_id: str
    endpoint: str
    completion_window: Literal["24h"]
    metadata: dict[str, str] | None


class RequestCounts(TypedDict):
    total: int
    completed: int
    failed: int


class BatchObject(TypedDict):
    """OpenAI's record of a batch; times are null until then."""

    id: str
    object: Literal["batch"]
    endpoint: str
    input_file_id: str
    completion_window: Literal["24h"]
    status: str
    errors: dict[str, Any] | None
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    expires_at: int
    in_progress_at: int | None
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: RequestCounts
    metadata: dict[str, str] | None


class BatchList(TypedDict):
    object: Literal["list"]
    data: list[BatchObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


async def post_batch(incoming: Incoming) -> Response:
    body = incoming.object()
    endpoint, file_id = body.get("endpoint"), body.get("input_file_id")
    if not isinstance(endpoint, str) or endpoint not in KINDS:
        raise bad_request(f"'endpoint' must be one of {', '.join(KINDS)}.", param="endpoint")
    if body.get("completion_window", "24h") != "24h":
        raise bad_request("'completion_window' must be '24h'.", param="completion_window")
    if not isinstance(file_id, str) or not FILE_ID.fullmatch(file_id):
        raise bad_request("'input_file_id' must be the id of an uploaded file.", param="input_file_id")
    record = await stored(incoming.gateway.files.get, incoming.caller.tenant, file_id)
    if record is None:
        raise file_not_found(file_id, "input_file_id")
    if record.purpose != "batch":
        raise bad_request("The input file must have been uploaded with purpose 'batch'.", param="input_file_id")
    batch = new_batch(incoming.caller.tenant, endpoint, file_id, metadata_of(body))
    await incoming.gateway.batches.add(batch)
    incoming.gateway.new_batch.set()
    return Json(batch_object(batch))


def metadata_of(body: dict[str, Any]) -> dict[str, str]:
    """Raises ApiError 400."""
    metadata = body.get("metadata")
    metadata = {} if metadata is None else metadata
    fits = isinstance(metadata, dict) and len(metadata) <= MOST_METADATA
    if not fits or not all(
        isinstance(v, str) and len(k) <= MOST_KEY and len(v) <= MOST_VALUE for k, v in metadata.items()
    ):
        message = f"'metadata' is at most {MOST_METADATA} strings of up to {MOST_VALUE} characters."
        raise bad_request(message, param="metadata")
    return metadata


async def list_batches(incoming: Incoming) -> Response:
    shelf, tenant = incoming.gateway.batches, incoming.caller.tenant
    limit, ids = incoming.limit(PAGE, MOST_PER_PAGE), behind(incoming, await shelf.ids(tenant), BATCH_ID)
    rows = [batch_object(batch) for name in ids[:limit] if (batch := await shelf.get(tenant, name))]
    return Json(list_object(rows, len(ids) > limit))


async def get_batch(incoming: Incoming) -> Response:
    batch = await incoming.gateway.batches.get(incoming.caller.tenant, incoming.path("id"))
    if batch is None:
        raise batch_not_found(incoming.path("id"))
    return Json(batch_object(batch))


async def cancel_batch(incoming: Incoming) -> Response:
    """What runs is stopped; results that are there are kept in the files."""
    step = partial(cancelled, now=int(time.time()))
    batch = await incoming.gateway.batches.change(incoming.caller.tenant, incoming.path("id"), step)
    if batch is None:
        raise batch_not_found(incoming.path("id"))
    if batch.status != "cancelling" and batch.status != "cancelled":
        message = f"Batch '{batch.id}' is {batch.status}; there is nothing to cancel."
        raise ApiError(409, message, code="batch_over", param="id", headers=NO_RETRY)
    return Json(batch_object(batch))


def batch_not_found(batch_id: str) -> ApiError:
    return not_found(f"There is no batch '{batch_id}'.", code="batch_not_found", param="id")


def batch_object(batch: Batch) -> BatchObject:
    completed, failed = batch.counts
    times = {name: getattr(batch, name) or None for name in TIMES}
    return {
        "id": batch.id,
        "object": "batch",
        "endpoint": batch.endpoint,
        "input_file_id": batch.input_file_id,
        "completion_window": "24h",
        "status": batch.status,
        "errors": {"object": "list", "data": batch.errors} if batch.errors else None,
        "output_file_id": batch.output_file_id or None,
        "error_file_id": batch.error_file_id or None,
        "created_at": batch.created_at,
        "expires_at": batch.expires_at,
        "request_counts": {"total": batch.total, "completed": completed, "failed": failed},
        "metadata": batch.metadata or None,
        **times,  # type: ignore[typeddict-item]
    }


NO_BATCH = {404: "There is no such batch."}

BATCH_ENDPOINTS = [
    Endpoint(
        "POST",
        "/v1/batches",
        post_batch,
        "invoke",
        "Run a file of requests when there is room, within 24 hours.",
        "OpenAI",
        request=BatchRequestBody,
        answer=BatchObject,
        problems={404: "There is no such file."},
    ),
    Endpoint(
        "GET", "/v1/batches", list_batches, "invoke", "The caller's batches.", "OpenAI", answer=BatchList, asks=PAGES
    ),
    Endpoint(
        "GET", "/v1/batches/{id}", get_batch, "invoke", "One batch.", "OpenAI", answer=BatchObject, problems=NO_BATCH
    ),
    Endpoint(
        "POST",
        "/v1/batches/{id}/cancel",
        cancel_batch,
        "invoke",
        "Cancel a batch; partial results are kept.",
        "OpenAI",
        answer=BatchObject,
        problems={**NO_BATCH, 409: "The batch is over."},
    ),
]
