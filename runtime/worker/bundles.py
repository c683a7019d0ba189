"""Code bundles of functions: zip files in the object store, unpacked once per host under their digest."""

import hashlib
import os
import shutil
import tempfile
import zipfile
from io import BytesIO
from pathlib import Path, PurePosixPath

from stoker.coldstart.failures import ObjectAltered
from stoker.coldstart.store import open_store
from stoker.runtime.settings import Settings


def unpack_bundle(settings: Settings, digest: str) -> Path:
    """The folder with the bundle's files. Raises ColdStartError when it is missing or altered."""
    target = settings.data_dir / "bundles" / digest
    if target.exists():
        return target
    key = f"bundles/{digest}.zip"
    data = open_store(settings.store).read(key)
    if hashlib.sha256(data).hexdigest() != digest:
        raise ObjectAltered(f"{settings.store}/{key}", None, "its sha256 is not the one it was deployed with")
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=target.parent))
    try:
        extract(data, scratch)
        os.rename(scratch, target)
    except OSError:
        if not target.exists():
            raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def extract(data: bytes, folder: Path) -> None:
    """Refuses members that would land outside the folder."""
    with zipfile.ZipFile(BytesIO(data)) as bundle:
        for name in bundle.namelist():
            path = PurePosixPath(name)
            if path.is_absolute() or ".." in path.parts:
                raise ValueError(f"bundle member {name!r} points outside the bundle; deploy it again")
        bundle.extractall(folder)
