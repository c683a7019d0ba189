"""`stoker push`: from a Hugging Face folder or a GGUF file to a published model, from a PEFT folder to an adapter."""

import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from stoker.coldstart.failures import UnsupportedModel
from stoker.coldstart.file_store import FileStore
from stoker.coldstart.manifest import Manifest, TensorEntry
from stoker.coldstart.publish import publish
from stoker.coldstart.repository import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    CONFIG,
    INDEX,
    SINGLE,
    read_index,
    scan_adapter,
)
from stoker.coldstart.store import ObjectStore, open_store
from stoker.runtime.adapters.peft import AdapterConfig, check_tensors
from stoker.runtime.spec import InvalidSpec

TOKENIZER = "tokenizer.json"

# All bits of the exponent are set in numbers that aren't finite.
EXPONENTS = {"F32": ("<u4", 0x7F800000), "F16": ("<u2", 0x7C00), "BF16": ("<u2", 0x7F80)}

Progress = Callable[[int, int], None]


def push_model(source: Path, destination: str, on_progress: Progress | None = None) -> dict[str, Any]:
    """Publishes `source`. Raises InvalidSpec for a source that is no model, ColdStartError for a damaged one."""
    if is_adapter(source):
        return push_adapter(source, destination, on_progress)
    if source.is_dir():
        return push_folder(source, destination, on_progress)
    if source.suffix != ".gguf" or not source.is_file():
        raise InvalidSpec(f"{source} is neither a Hugging Face model folder nor a .gguf file")
    try:
        from stoker.coldstart.gguf_model import convert_gguf
    except ModuleNotFoundError as error:
        raise InvalidSpec("reading .gguf files needs the package gguf: pip install 'stoker[gguf]'") from error

    with tempfile.TemporaryDirectory() as scratch:
        convert_gguf(source, Path(scratch))
        return push_folder(Path(scratch), destination, on_progress)


def push_folder(source: Path, destination: str, on_progress: Progress | None) -> dict[str, Any]:
    if absent := missing_parts(source):
        if (source / ADAPTER_WEIGHTS).is_file():
            raise InvalidSpec(f"{source} is no whole adapter: it lacks {ADAPTER_CONFIG}, which PEFT saves beside it")
        raise InvalidSpec(f"{source} is no whole Hugging Face model folder: it lacks {', '.join(absent)}")
    store = opened(destination)
    return facts_of(store, publish(source, store, on_progress))


def is_adapter(source: Path) -> bool:
    return (source / ADAPTER_CONFIG).is_file() and not any((source / name).exists() for name in (SINGLE, INDEX))


def push_adapter(source: Path, destination: str, on_progress: Progress | None) -> dict[str, Any]:
    if not (source / ADAPTER_WEIGHTS).is_file():
        raise InvalidSpec(f"{source} lacks {ADAPTER_WEIGHTS}: save the adapter in safetensors")
    config = AdapterConfig.read((source / ADAPTER_CONFIG).read_bytes())
    tensors = scan_adapter(FileStore(source)).tensors
    check_tensors(((t.name, t.dtype, t.shape) for t in tensors), config)
    check_numbers(source / ADAPTER_WEIGHTS, tensors)
    store = opened(destination)
    return facts_of(store, publish(source, store, on_progress, layout=scan_adapter))


def check_numbers(file: Path, tensors: Iterable[TensorEntry]) -> None:
    """Raises UnsupportedModel for weights that hold NaN or infinity: every answer with them would be noise."""
    for tensor in tensors:
        bits, exponent = EXPONENTS[tensor.dtype]
        words = np.memmap(file, bits, "r", tensor.offset, (tensor.length // np.dtype(bits).itemsize,))
        if bad := int(np.count_nonzero(words & exponent == exponent)):
            reason = f"tensor {tensor.name[:200]} holds {bad} numbers that are NaN or infinite: the training diverged"
            raise UnsupportedModel(ADAPTER_WEIGHTS, None, reason)


def opened(destination: str) -> ObjectStore:
    try:
        return open_store(destination)
    except ValueError as error:
        raise InvalidSpec(str(error)) from error


def facts_of(store: ObjectStore, manifest: Manifest) -> dict[str, Any]:
    return {
        "url": store.url,
        "revision": manifest.revision,
        "tensors": len(manifest.tensors),
        "bytes": manifest.total_bytes,
    }


def missing_parts(folder: Path) -> list[str]:
    """What a model needs and `folder` doesn't have. Raises ManifestInvalid for an index that can't be read."""
    names = {path.name for path in folder.iterdir()}
    absent = [name for name in (CONFIG, TOKENIZER) if name not in names]
    weights = [name for name in names if name.endswith(".safetensors")]
    if INDEX in names:
        return absent + sorted(set(read_index(FileStore(folder)).values()) - names)
    if not weights:
        return [*absent, f"{SINGLE} (weights of another format have to be converted to safetensors)"]
    return absent + ([INDEX] if len(weights) > 1 and SINGLE not in names else [])
