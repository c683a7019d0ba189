"""An object store in a local or network-mounted folder."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from stoker.coldstart.failures import FetchCancelled, ObjectChanged, ObjectMissing, ObjectTruncated, StoreUnavailable
from stoker.coldstart.store import ObjectInfo, ReadWatch, checked_key

TEMPORARY = ".tmp-"


class FileStore:
    """Objects are plain files below `folder`, which need not exist yet. The ETag is made of size and mtime."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.absolute()
        self.url = self.folder.as_uri()

    def stat(self, key: str) -> ObjectInfo:
        with self._reading(key) as fd:
            return info(key, os.fstat(fd))

    def read(self, key: str) -> bytes:
        with self._reading(key) as fd, open(fd, "rb", closefd=False) as file:
            return file.read()

    def read_range(
        self, key: str, offset: int, into: memoryview, etag: str = "", watch: ReadWatch | None = None
    ) -> None:
        span = (offset, offset + len(into))
        with self._reading(key) as fd:
            found = info(key, os.fstat(fd))
            if etag and found.etag != etag:
                raise ObjectChanged(self._name(key), span, f"its version is {found.etag}, not {etag}")
            read = 0
            while read < len(into):
                if watch is not None and watch.stop.is_set():
                    raise FetchCancelled(self._name(key), span, "the read was cancelled")
                count = os.preadv(fd, [into[read:]], offset + read)
                if not count:
                    raise ObjectTruncated(self._name(key), span, f"the file ends at byte {found.size}")
                read += count
                if watch is not None:
                    watch.received += count

    def write(self, key: str, data: bytes | Path) -> ObjectInfo:
        path = self.locate(key)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            return self._replace(key, path, data)
        except OSError as error:
            raise StoreUnavailable(self._name(key), None, f"can't write: {error}") from error

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        paths = (Path(folder, name) for folder, _, names in os.walk(self.folder) for name in names)
        keys = {path.relative_to(self.folder).as_posix(): path for path in paths if not path.name.startswith(TEMPORARY)}
        for key in sorted(keys):
            if key.startswith(prefix):
                with suppress(FileNotFoundError):
                    yield info(key, keys[key].stat())

    def signed_url(self, key: str, media_type: str) -> str:
        return ""

    def delete(self, key: str) -> None:
        try:
            self.locate(key).unlink(missing_ok=True)
        except OSError as error:
            raise StoreUnavailable(self._name(key), None, f"can't delete: {error}") from error

    def _replace(self, key: str, path: Path, data: bytes | Path) -> ObjectInfo:
        fd, temporary = tempfile.mkstemp(prefix=TEMPORARY, dir=path.parent)
        try:
            with open(fd, "wb") as target:
                fill(target, data)
                target.flush()
                os.fchmod(fd, 0o644)
                os.fsync(fd)
                written = info(key, os.fstat(fd))
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
        sync_folder(path.parent)
        return written

    @contextmanager
    def _reading(self, key: str) -> Iterator[int]:
        try:
            fd = os.open(self.locate(key), os.O_RDONLY | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise ObjectMissing(self._name(key), None, "there is no such file") from error
        except OSError as error:
            raise StoreUnavailable(self._name(key), None, f"can't open: {error}") from error
        try:
            yield fd
        except OSError as error:
            raise StoreUnavailable(self._name(key), None, f"can't read: {error}") from error
        finally:
            os.close(fd)

    def locate(self, key: str) -> Path:
        """Where the object lies on this machine, whether or not it is there."""
        return self.folder / checked_key(key)

    def _name(self, key: str) -> str:
        return f"{self.url}/{key}"


def info(key: str, found: os.stat_result) -> ObjectInfo:
    return ObjectInfo(key, found.st_size, f"{found.st_size:x}-{found.st_mtime_ns:x}")


def fill(target, data: bytes | Path) -> None:
    if isinstance(data, Path):
        with open(data, "rb") as source:
            shutil.copyfileobj(source, target, 1 << 22)
    else:
        target.write(data)


def sync_folder(folder: Path) -> None:
    """A rename survives power loss only once its folder is on disk."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
