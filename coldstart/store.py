"""Object stores: where published models, code bundles and big payloads live."""

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol
from urllib.parse import unquote, urlsplit

ACCEPTED = "file:///absolute/folder or s3://bucket/prefix"


class ObjectInfo(NamedTuple):
    """`etag` names the stored version of the object; its form is the store's own."""

    key: str
    size: int
    etag: str


@dataclass(slots=True)
class ReadWatch:
    """Shared with a read in progress: `stop` ends it early (FetchCancelled), `retries` counts its repeated attempts,
    `refusals` those that the store asked to slow down by (429, 503, reset), `received` the bytes so far, `checked_s`
    the time that their checksums took. Without `verify`, somebody else compares the checksums."""

    stop: threading.Event = field(default_factory=threading.Event)
    retries: int = 0
    refusals: int = 0
    received: int = 0
    checked_s: float = 0.0
    verify: bool = True


class ObjectStore(Protocol):
    """Thread-safe. Keys are relative, separated by "/". Every method raises a ColdStartError when it fails."""

    url: str

    def stat(self, key: str) -> ObjectInfo: ...

    def read(self, key: str) -> bytes: ...

    def read_range(
        self, key: str, offset: int, into: memoryview, etag: str = "", watch: ReadWatch | None = None
    ) -> None:
        """Fills the whole of `into` (writable bytes) or raises; a given `etag` must still be the stored one."""
        ...

    def write(self, key: str, data: bytes | Path) -> ObjectInfo:
        """Atomic: readers see the old object or the new one, whatever dies meanwhile."""
        ...

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]: ...

    def delete(self, key: str) -> None:
        """Deleting what isn't there is not an error."""
        ...

    def signed_url(self, key: str, media_type: str) -> str:
        """With which anyone may read the object for some minutes, as `media_type`; "" from a store that has none."""
        ...


def open_store(url: str) -> ObjectStore:
    """Raises ValueError for a URL of another form than `file:///folder` or `s3://bucket/prefix`."""
    parts = urlsplit(url)
    if parts.query or parts.fragment:
        raise ValueError(f"store URL {url!r} has a query or fragment; accepted: {ACCEPTED}")
    if parts.scheme == "file" and not parts.netloc and parts.path.startswith("/"):
        from stoker.coldstart.file_store import FileStore

        return FileStore(Path(unquote(parts.path)))
    if parts.scheme == "s3" and parts.netloc:
        from stoker.coldstart.s3_store import S3Store

        return S3Store(parts.netloc, unquote(parts.path).strip("/"))
    raise ValueError(f"store URL {url!r} is not understood; accepted: {ACCEPTED}")


def checked_key(key: str) -> str:
    """Raises ValueError for a key that could leave the store's folder or prefix."""
    if not key or "\0" in key or any(part in ("", ".", "..") for part in key.split("/")):
        raise ValueError(f"object key {key!r} must be a relative path without empty, '.' or '..' parts")
    return key
