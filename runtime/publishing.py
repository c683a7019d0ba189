"""`stoker push`: from a Hugging Face folder or a GGUF file to a published model."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stoker.coldstart.publish import publish
from stoker.coldstart.store import open_store
from stoker.runtime.spec import InvalidSpec

Progress = Callable[[int, int], None]


def push_model(source: Path, destination: str, on_progress: Progress | None = None) -> dict[str, Any]:
    """Publishes `source`. Raises InvalidSpec for a source that is no model, ColdStartError for a damaged one."""
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
    try:
        store = open_store(destination)
    except ValueError as error:
        raise InvalidSpec(str(error)) from error
    manifest = publish(source, store, on_progress)
    return {
        "url": store.url,
        "revision": manifest.revision,
        "tensors": len(manifest.tensors),
        "bytes": manifest.total_bytes,
    }
