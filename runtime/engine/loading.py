"""A model whose weights are still arriving, chunk by chunk, and how it becomes an engine."""

import json
import time
from collections.abc import Mapping
from typing import Any

import torch

from stoker.coldstart.failures import ColdStartError, UnsupportedModel
from stoker.coldstart.manifest import Manifest
from stoker.coldstart.timeline import Record, Timeline
from stoker.coldstart.upload import Uploader
from stoker.runtime.engine.config import CONFIG, ModelConfig
from stoker.runtime.engine.engine import Engine
from stoker.runtime.engine.options import EngineOptions
from stoker.runtime.engine.prefix import BLOCK_TOKENS
from stoker.runtime.engine.weights import plan

GENERATION_CONFIG = "generation_config.json"


class ModelLoad:
    """Allocates the parameters at once; raises a ColdStartError or ValueError for a model that can't be loaded."""

    def __init__(self, manifest: bytes, documents: Mapping[str, bytes], options: Mapping[str, Any]) -> None:
        self._timeline = Timeline()
        self._upload_ns: list[int] = []
        self._busy_ns = 0
        with self._timeline.phase("allocate weights") as facts:
            self._manifest = Manifest.unpack(manifest)
            self._config = read_config(documents)
            self._options = EngineOptions.from_dict(options).resolve(self._config)
            self._weights = plan(self._config, self._options)
            self._uploader = Uploader(self._manifest, self._weights.targets)
            facts["bytes"] = self._weights.arena.nbytes

    def place(self, chunk: int, data: memoryview) -> None:
        start = time.monotonic_ns()
        self._uploader.place(chunk, data)
        end = time.monotonic_ns()
        self._upload_ns += [start, end]
        self._busy_ns += end - start

    def finish(self) -> tuple[Engine, list[Record], dict[str, Any]]:
        """The engine, the timeline and the facts of the loaded model. Raises when bytes are missing or the KV cache
        doesn't fit."""
        self._uploader.finish()
        if self._upload_ns:
            facts = {"bytes": self._manifest.total_bytes, "busy_s": self._busy_ns / 1e9}
            self._timeline.add("upload weights", self._upload_ns[0], self._upload_ns[-1], **facts)
        with self._timeline.phase("allocate KV cache") as facts:
            engine = Engine(self._config, self._options, self._weights, self._manifest.revision)
            facts["bytes"] = engine.kv.total_bytes
        with self._timeline.phase("warm up"):
            engine.runner.warm_up()
        return engine, self._timeline.records(), self._facts(engine)

    def _facts(self, engine: Engine) -> dict[str, Any]:
        options = engine.options
        return {
            "revision": self._manifest.revision,
            "parameters": sum(target.numel() for target in self._weights.targets.values()),
            "parameter_bytes": self._weights.arena.nbytes,
            "device": options.device,
            "device_name": torch.cuda.get_device_name() if options.device == "cuda" else "cpu",
            "dtype": options.dtype,
            "threads": torch.get_num_threads(),
            "kv_blocks": engine.kv.num_blocks,
            "kv_bytes": engine.kv.total_bytes,
            "block_tokens": BLOCK_TOKENS,
            "max_model_len": options.max_model_len,
            "max_seqs": options.max_seqs,
            "token_budget": options.token_budget,
        }


def read_config(documents: Mapping[str, bytes]) -> ModelConfig:
    if CONFIG not in documents:
        raise UnsupportedModel(CONFIG, None, "the model was published without it")
    return ModelConfig.from_hf(parse(documents, CONFIG), parse(documents, GENERATION_CONFIG))


def parse(documents: Mapping[str, bytes], name: str) -> dict[str, Any]:
    try:
        value = json.loads(documents.get(name, b"{}"))
    except ValueError as error:
        raise UnsupportedModel(name, None, f"not JSON: {error}") from error
    if not isinstance(value, dict):
        raise UnsupportedModel(name, None, "not a JSON object")
    return value


def describe(error: Exception) -> dict[str, Any]:
    """The error record of a failed load."""
    record = {"type": "internal_error", "message": str(error), "code": type(error).__name__}
    if isinstance(error, ColdStartError):
        return {**record, "type": "cold_start_error", "facts": error.as_dict()}
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return {**record, "type": "out_of_memory"}
    if isinstance(error, ValueError):
        return {**record, "type": "model_error"}
    return {**record, "message": f"{type(error).__name__}: {error}"}
