"""Compiled kernels of this host's engines: kept as artifacts on disk and in the operator's object store, one for each
model, and put in place before the engine's first launch.

Artifacts hold native code, so they are kept in the deployment's own store, not beside weights that may come from
anywhere. Every engine process starts with an empty cache folder of its own: nothing is taken from a folder that some
process left behind, only from artifacts whose checksums are right.
"""

import asyncio
import contextlib
import logging
import platform
import shutil
import sys
import threading
import time
import uuid
from dataclasses import dataclass, field
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from stoker.coldstart.failures import ColdStartError, ObjectMissing
from stoker.coldstart.kernel_cache import (
    KernelsUnusable,
    artifact_key,
    checked,
    file_names,
    pack,
    read_index,
    unpack,
    write_atomically,
)
from stoker.coldstart.store import ObjectStore

PACKAGES = ("triton", "torch")
GPU_FACTS = Path("/proc/driver/nvidia/gpus")
PREFIX = "kernels"

log = logging.getLogger("stoker.worker")


@dataclass
class KernelCache:
    """The folder in which an engine finds kernels and leaves those that it compiles. `placed` are its files that came
    from artifacts, of all models that the engine has."""

    folder: Path
    placed: set[str] = field(default_factory=set)

    def empty(self) -> None:
        self.placed.clear()
        empty_folder(self.folder)


@dataclass
class Restored:
    """What came before the engine's first launch: an artifact, or nothing, and its files."""

    source: str = "none"
    artifact: bytes = b""
    began_ns: int = 0
    ended_ns: int = 0
    files: frozenset[str] = frozenset()

    def phase(self) -> dict[str, Any]:
        times = {"start_ns": self.began_ns, "end_ns": self.ended_ns}
        facts = {"bytes": len(self.artifact), "source": self.source, "files": len(self.files)}
        return {"name": "kernel restore", **times, **facts}


@dataclass
class KernelStore:
    """Blocking calls; they raise nothing but programming errors: without an artifact, kernels are compiled."""

    folder: Path
    store: ObjectStore
    gpu: str

    @cached_property
    def key(self) -> str:
        return artifact_key(compiler_facts(self.gpu), kernel_sources())

    def read(self, model: str) -> Restored:
        """From disk, else from the store (then also kept on disk)."""
        found = Restored()
        if artifact := self._read_disk(model):
            found.source, found.artifact = "disk", artifact
        elif artifact := self._read_store(model):
            found.source, found.artifact = "store", artifact
            self._write_disk(model, artifact)
        return found

    def place(self, found: Restored, cache: KernelCache) -> None:
        found.began_ns = time.monotonic_ns()
        try:
            if found.artifact:
                found.files = names_in(found.artifact)
                cache.placed |= found.files
                unpack(found.artifact, self.key, cache.folder)
        except OSError as error:
            log.warning("compiled kernels can't be put in place: %s", error)
        found.ended_ns = time.monotonic_ns()

    def keep(self, model: str, found: Restored, cache: KernelCache) -> bool:
        """Makes the artifact of what the engine has in its cache; False when it compiled nothing that the artifact
        lacks, or has gone with what it had."""
        files = file_names(cache.folder)
        if not files or not found.files <= files or (found.artifact and files <= found.files | cache.placed):
            return False
        try:
            artifact = pack(cache.folder, self.key)
        except OSError as error:
            log.warning("compiled kernels can't be read back: %s", error)
            return False
        found.artifact, found.files = artifact, files
        self._write_disk(model, artifact)
        try:
            self.store.write(self._object(model), artifact)
        except ColdStartError as error:
            log.warning("compiled kernels stay on this host: %s", error)
        return True

    def _read_disk(self, model: str) -> bytes:
        path = self._path(model)
        try:
            return self._usable(path.read_bytes(), str(path))
        except FileNotFoundError:
            return b""

    def _write_disk(self, model: str, artifact: bytes) -> None:
        try:
            write_atomically(self._path(model), artifact)
        except OSError as error:
            log.warning("compiled kernels can't be kept on disk: %s", error)

    def _read_store(self, model: str) -> bytes:
        try:
            return self._usable(self.store.read(self._object(model)), self._object(model))
        except ObjectMissing:
            return b""
        except ColdStartError as error:
            log.warning("compiled kernels can't be fetched: %s", error)
            return b""

    def _usable(self, artifact: bytes, where: str) -> bytes:
        try:
            checked(artifact, self.key)
        except KernelsUnusable as error:
            log.warning("%s: %s", where, error)
            return b""
        return artifact

    def _path(self, model: str) -> Path:
        return self.folder / f"{self.key[:16]}-{model}.kernels"

    def _object(self, model: str) -> str:
        return f"{PREFIX}/{self.key}/{model}"


class EngineKernels:
    """One model's kernels in one engine's cache: read while the engine starts, placed before it loads, kept once it is
    ready. Without a store nothing happens."""

    def __init__(self, kernels: KernelStore | None, model: str, cache: KernelCache) -> None:
        self._kernels = kernels
        self._model = model
        self._cache = cache
        self._reading = asyncio.create_task(asyncio.to_thread(kernels.read, model)) if kernels else None

    async def place(self) -> list[dict[str, Any]]:
        """The timeline's phases of the restoration."""
        if self._kernels is None or self._reading is None:
            return []
        found = await self._reading
        await asyncio.to_thread(self._kernels.place, found, self._cache)
        return [found.phase()]

    @property
    def restored(self) -> bool:
        """Whether an artifact was in place at the engine's start. Ask after `place`."""
        return self._reading is not None and bool(self._reading.result().artifact)

    async def keep(self) -> None:
        if self._kernels and self._reading:
            await asyncio.to_thread(self._kernels.keep, self._model, self._reading.result(), self._cache)


def empty_folder(path: Path) -> Path:
    """What was in it is put aside at once, and deleted by and by: no start waits for that."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileNotFoundError):
        path.rename(path.with_name(f".{path.name}.{uuid.uuid4().hex}"))
    path.mkdir()
    old = list(path.parent.glob(f".{path.name}.*"))
    threading.Thread(target=remove, args=(old,), daemon=True, name="cleaning").start()
    return path


def names_in(artifact: bytes) -> frozenset[str]:
    return frozenset(name for name, _, _ in read_index(artifact)[0]["files"])


def remove(folders: list[Path]) -> None:
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def compiler_facts(gpu: str) -> dict[str, str]:
    """What compiled kernels depend on besides their source. The driver is not part of it: it takes older code."""
    python = f"{sys.implementation.cache_tag}-{platform.machine()}"
    return {"gpu": gpu, "python": python, **{name: installed(name) for name in PACKAGES}}


def installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def kernel_sources() -> list[Path]:
    """Every file that holds a kernel or decides how one is compiled; found without importing any."""
    engine = Path(__file__).parents[1] / "engine"
    spec = find_spec("stoker.kernels")
    folders = spec.submodule_search_locations if spec else None
    kernels = [path for folder in folders or () for path in Path(folder).iterdir() if path.suffix in (".py", ".json")]
    return [*kernels, engine / "prepare.py"]


def gpu_model(device: str, facts: Path = GPU_FACTS) -> str:
    """What the driver calls the GPU of `cuda:N`; "" on a CPU, or where the driver tells nothing."""
    index = int(device.partition(":")[2] or 0)
    files = sorted(facts.glob("*/information")) if device != "cpu" and facts.is_dir() else []
    lines = files[index].read_text().splitlines() if index < len(files) else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("Model:")]
    return names[0] if names else ""
