"""Files that tenants send and get: the bytes and, written after them, a small record, both in the object store."""

import json
import re
import secrets
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from stoker.coldstart.failures import ObjectMissing
from stoker.coldstart.store import ObjectStore

PREFIX, RESULTS = "files", "batches"
FILE_ID = re.compile(r"file-[a-z0-9]{1,64}")
COPY_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class FileRecord:
    """Ids rise with time, so that their order is the order of creation."""

    id: str
    bytes: int
    created_at: int
    filename: str
    purpose: str


def new_file_id() -> str:
    return f"file-{time.time_ns() // 1_000_000:012x}{secrets.token_hex(6)}"


class FileShelf:
    """Blocking; each method raises a ColdStartError when the store fails."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    def put(self, tenant: str, record: FileRecord, content: Path) -> None:
        """A file without its record isn't there: what is interrupted leaves no half file."""
        self._store.write(content_key(tenant, record.id), content)
        self._store.write(record_key(tenant, record.id), json.dumps(asdict(record)).encode())

    def get(self, tenant: str, file_id: str) -> FileRecord | None:
        try:
            return FileRecord(**json.loads(self._store.read(record_key(tenant, file_id))))
        except ObjectMissing:
            return None

    def all(self, tenant: str) -> list[str]:
        """Ids, the newest first."""
        names = (info.key.rpartition("/")[2] for info in self._store.list(f"{PREFIX}/{tenant}/"))
        return sorted((name.removesuffix(".json") for name in names if name.endswith(".json")), reverse=True)

    def remove_results(self, tenant: str, batch_id: str) -> None:
        """Stretches of a batch's results, which nobody needs once they are a file."""
        self._remove_below(f"{RESULTS}/{tenant}/{batch_id}/")

    def remove_all(self, tenant: str) -> None:
        for prefix in (PREFIX, RESULTS):
            self._remove_below(f"{prefix}/{tenant}/")

    def _remove_below(self, prefix: str) -> None:
        for info in list(self._store.list(prefix)):
            self._store.delete(info.key)

    def remove(self, tenant: str, file_id: str) -> None:
        self._store.delete(record_key(tenant, file_id))
        self._store.delete(content_key(tenant, file_id))

    def parts(self, tenant: str, record: FileRecord) -> Iterator[bytes]:
        for offset in range(0, record.bytes, COPY_BYTES):
            part = bytearray(min(COPY_BYTES, record.bytes - offset))
            self._store.read_range(content_key(tenant, record.id), offset, memoryview(part))
            yield bytes(part)

    def fetch(self, tenant: str, record: FileRecord, to: Path) -> None:
        with to.open("wb") as file:
            for part in self.parts(tenant, record):
                file.write(part)


def content_key(tenant: str, file_id: str) -> str:
    return f"{PREFIX}/{tenant}/{file_id}"


def result_key(tenant: str, batch_id: str, segment: int, good: bool) -> str:
    return f"{RESULTS}/{tenant}/{batch_id}/{segment:06d}.{'output' if good else 'errors'}"


def record_key(tenant: str, file_id: str) -> str:
    return f"{PREFIX}/{tenant}/{file_id}.json"
