"""Big payloads: the queue carries a reference, the bytes are in the object store, under the id of their job.

The gateway writes, workers read, and the controller's sweep deletes what no job needs any more.
"""

import hashlib

from stoker.coldstart.failures import ObjectAltered
from stoker.coldstart.store import ObjectStore
from stoker.queue.records import function_of, pack, unpack

INLINE_LIMIT = 64 * 1024
PREFIX = "payloads/"
# No version byte of the queue's codec, so that no reader takes a reference for a payload.
REFERENCE = b"\x00"


def object_key(job_id: str) -> str:
    return f"{PREFIX}{function_of(job_id)}/{job_id}"


def job_of(key: str) -> str | None:
    """The job whose payload is stored under `key`; None for an object that is no payload."""
    job_id = key.rpartition("/")[2]
    try:
        return job_id if key == object_key(job_id) else None
    except ValueError:
        return None


def is_reference(payload: bytes) -> bool:
    return payload.startswith(REFERENCE)


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
    key = object_key(job_id)
    size, digest = unpack(payload[len(REFERENCE) :])
    data = store.read(key)
    if len(data) != size or hashlib.sha256(data).digest() != digest:
        raise ObjectAltered(f"{store.url}/{key}", None, "it is not the payload that was queued")
    return data
