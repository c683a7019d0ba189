"""Compiled kernels as one artifact: a folder of Triton's cache packed into bytes that name what they were made for.

An artifact holds native code. It is taken only under the very key that is asked for (`artifact_key`), only whole and
with every checksum right, and belongs into a store that nobody but the operator writes. Triton in turn looks a kernel
up by its source, its options and its compiler, so a wrong artifact could cost time, never a wrong kernel.

Triton notes where a kernel's files lie in a file of its own ("__grp__..."), as absolute paths: an artifact has names
there, and whoever unpacks it gets the paths of the new place.
"""

import hashlib
import json
import os
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from stoker.coldstart.failures import ColdStartError

MAGIC = b"stoker kernels 1\n"
GROUP = "__grp__"
UNFINISHED = "tmp.pid_"
LENGTH_BYTES = 8


class KernelsUnusable(ColdStartError):
    """A kernel artifact that is damaged, or was made for something else. Kernels are compiled instead."""

    advice = "it is made again by the next engine that starts without one"


def artifact_key(facts: Mapping[str, str], sources: Iterable[Path]) -> str:
    """Hex digest of everything that compiled kernels depend on: versions and GPU, and the kernels' own source."""
    digest = hashlib.sha256(MAGIC)
    parts = [f"{name}={value}".encode() for name, value in sorted(facts.items())]
    parts += [path.name.encode() + b"\0" + path.read_bytes() for path in sorted(sources)]
    for part in parts:
        digest.update(len(part).to_bytes(LENGTH_BYTES, "little") + part)
    return digest.hexdigest()


def file_names(folder: Path) -> frozenset[str]:
    """The finished files of a Triton cache, relative to it."""
    paths = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return frozenset(path.as_posix() for path in paths if not any(part.startswith(UNFINISHED) for part in path.parts))


def pack(folder: Path, key: str) -> bytes:
    names = sorted(file_names(folder))
    bodies = [portable(name, (folder / name).read_bytes()) for name in names]
    files = [[name, len(body), hashlib.sha256(body).hexdigest()] for name, body in zip(names, bodies, strict=True)]
    index = json.dumps({"key": key, "files": files}).encode()
    head = MAGIC + len(index).to_bytes(LENGTH_BYTES, "little") + index
    return b"".join([head, hashlib.sha256(head).digest(), *bodies])


def unpack(artifact: bytes, key: str, folder: Path) -> int:
    """Writes the files that `folder` doesn't have yet; returns how many there are in the artifact. Raises
    KernelsUnusable, and then has written nothing."""
    files = checked(artifact, key)
    # A group names the other files: once it is there, so must they be.
    for name in sorted(files, key=lambda name: PurePosixPath(name).name.startswith(GROUP)):
        target = folder / name
        if not target.exists():
            write_atomically(target, placed(name, files[name], target.parent))
    return len(files)


def checked(artifact: bytes, key: str) -> dict[str, bytes]:
    """The files by name. Raises KernelsUnusable unless every byte is as it was packed, for this key."""
    index, position = read_index(artifact)
    if index.get("key") != key:
        raise unusable(f"made for {index.get('key')!r}, wanted is {key!r}")
    files: dict[str, bytes] = {}
    for name, size, digest in index["files"]:
        body = artifact[position : position + size]
        if hashlib.sha256(body).hexdigest() != digest:
            raise unusable(f"{name} is damaged (checksum)")
        path = PurePosixPath(name)
        if path.is_absolute() or len(path.parts) != 2 or ".." in path.parts:
            raise unusable(f"{name!r} is no file of a kernel cache")
        files[name] = body
        position += size
    if position != len(artifact):
        raise unusable(f"{len(artifact)} bytes, expected are {position}")
    return files


def read_index(artifact: bytes) -> tuple[dict[str, Any], int]:
    """The index, and where the first file begins."""
    begin = len(MAGIC) + LENGTH_BYTES
    if not artifact.startswith(MAGIC) or len(artifact) < begin:
        raise unusable("no kernel artifact of this version")
    end = begin + int.from_bytes(artifact[len(MAGIC) : begin], "little")
    digest = hashlib.sha256(artifact[:end]).digest()
    if artifact[end : end + len(digest)] != digest:
        raise unusable("its index is damaged (checksum)")
    return json.loads(artifact[begin:end]), end + len(digest)


def portable(name: str, body: bytes) -> bytes:
    """A group's file without the place it was written at."""
    if not PurePosixPath(name).name.startswith(GROUP):
        return body
    paths = json.loads(body)["child_paths"]
    return json.dumps({"child_paths": {child: PurePosixPath(path).name for child, path in paths.items()}}).encode()


def placed(name: str, body: bytes, folder: Path) -> bytes:
    if not PurePosixPath(name).name.startswith(GROUP):
        return body
    children = json.loads(body)["child_paths"]
    return json.dumps({"child_paths": {child: str(folder / file) for child, file in children.items()}}).encode()


def write_atomically(target: Path, body: bytes) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=UNFINISHED)
    with os.fdopen(handle, "wb") as file:
        file.write(body)
    os.replace(temporary, target)


def unusable(reason: str) -> KernelsUnusable:
    return KernelsUnusable("kernel artifact", None, reason)
