"""Big payloads and results: the queue carries a reference, the bytes are in the object store, named after their job.

The gateway writes payloads and reads results, workers the other way round; the controller's sweep deletes what no job
needs any more.
"""

import hashlib

from stoker.coldstart.failures import ObjectAltered
from stoker.coldstart.store import ObjectStore
from stoker.queue.records import function_of, pack, unpack

INLINE_LIMIT = 64 * 1024
PREFIX = "payloads/"
RESULTS = "results/"
# No version byte of the queue's codec, so that no reader takes a reference for a payload.
REFERENCE = b"\x00"
# How the record {"value": ...} begins.
VALUE_HEAD = pack({"value": None})[:-1]


def object_key(job_id: str) -> str:
    return f"{PREFIX}{function_of(job_id)}/{job_id}"


def result_key(job_id: str, fence: int) -> str:
    """Each attempt has its own: what one that is over still writes can't take the place of the result that counts."""
    return f"{RESULTS}{function_of(job_id)}/{job_id}.{fence}"


def job_of(key: str) -> str | None:
    """The job whose payload or result is stored under `key`; None for another object."""
    job_id, _, fence = key.rpartition("/")[2].partition(".")
    try:
        wanted = result_key(job_id, int(fence)) if fence else object_key(job_id)
    except ValueError:
        return None
    return job_id if key == wanted else None


def is_reference(payload: bytes) -> bool:
    return payload.startswith(REFERENCE)


def size_of(result: bytes) -> int:
    """Of a result that the queue has as `result`, wherever it is, in bytes."""
    return unpack(result[len(REFERENCE) :])[1] if is_reference(result) else len(result)


def put(store: ObjectStore, job_id: str, payload: bytes) -> bytes:
    """What the queue is to carry: the payload itself, or a reference to it. Blocking; raises ColdStartError."""
    if len(payload) <= INLINE_LIMIT:
        return payload
    store.write(object_key(job_id), payload)
    return REFERENCE + pack([len(payload), hashlib.sha256(payload).digest()])


def get(store: ObjectStore, job_id: str, payload: bytes) -> bytes:
    """The payload of a job that the queue has as `payload`. Blocking; raises ColdStartError."""
    if not is_reference(payload):
        return payload
    size, digest = unpack(payload[len(REFERENCE) :])
    return checked(store, object_key(job_id), size, digest)


def put_result(store: ObjectStore, job_id: str, fence: int, result: bytes) -> bytes:
    """Like `put`, for the result of the attempt with this fence. A function's own value is stored as plain msgpack, so
    that its caller can read it there."""
    if len(result) <= INLINE_LIMIT:
        return result
    is_value = result.startswith(VALUE_HEAD)
    body = result.removeprefix(VALUE_HEAD)
    store.write(result_key(job_id, fence), body)
    return REFERENCE + pack([fence, len(body), hashlib.sha256(body).digest(), is_value])


def get_result(store: ObjectStore, job_id: str, result: bytes) -> bytes:
    """Like `get`, for a job's result."""
    if not is_reference(result):
        return result
    fence, size, digest, is_value = unpack(result[len(REFERENCE) :])
    body = checked(store, result_key(job_id, fence), size, digest)
    return VALUE_HEAD + body if is_value else body


def value_url(store: ObjectStore, job_id: str, result: bytes) -> str:
    """Where a big value can be read as msgpack for some minutes; "" when it can't. Raises ColdStartError."""
    if not is_reference(result):
        return ""
    fence, _, _, is_value = unpack(result[len(REFERENCE) :])
    return store.signed_url(result_key(job_id, fence), "application/msgpack") if is_value else ""


def checked(store: ObjectStore, key: str, size: int, digest: bytes) -> bytes:
    data = store.read(key)
    if len(data) != size or hashlib.sha256(data).digest() != digest:
        raise ObjectAltered(f"{store.url}/{key}", None, "it is not what was stored for the queue")
    return data
