"""A model whose weights are still arriving, chunk by chunk, and how it becomes an engine."""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from stoker.coldstart.arrival import Arrival
from stoker.coldstart.failures import ColdStartError, ObjectAltered, UnsupportedModel
from stoker.coldstart.host_image import HostImage
from stoker.coldstart.manifest import Manifest
from stoker.coldstart.mapped_source import MappedSource, Place
from stoker.coldstart.pinned import Registration
from stoker.coldstart.ring import Ring
from stoker.coldstart.timeline import Timeline
from stoker.coldstart.upload import Uploader, copy_stream, on_copy_stream
from stoker.runtime.architecture import ENCODERS, POOLING
from stoker.runtime.encoder import bert
from stoker.runtime.encoder.bert import BertConfig, BertWeights
from stoker.runtime.encoder.embedder import Embedder
from stoker.runtime.engine.config import CONFIG, ModelConfig
from stoker.runtime.engine.engine import Engine
from stoker.runtime.engine.options import EngineOptions
from stoker.runtime.engine.prefix import BLOCK_TOKENS
from stoker.runtime.engine.sizing import KVSize
from stoker.runtime.engine.weights import ModelWeights, arena_bytes, plan, stage_ends, stage_of, stages, total_bytes

if TYPE_CHECKING:
    from stoker.coldstart.device_check import DeviceCheck

GENERATION_CONFIG = "generation_config.json"


@dataclass(frozen=True, slots=True)
class Blueprint:
    """What a model is and how it is to be run; `options` are resolved."""

    manifest: Manifest
    config: ModelConfig | BertConfig
    options: EngineOptions

    @classmethod
    def read(cls, manifest: bytes, documents: Mapping[str, bytes], options: Mapping[str, Any]) -> "Blueprint":
        """Raises a ColdStartError or ValueError for a model that can't be loaded."""
        content, config = Manifest.unpack(manifest), read_config(documents)
        return cls(content, config, EngineOptions.from_dict(options).resolve(config))

    @property
    def arena_bytes(self) -> int:
        if isinstance(self.config, BertConfig):
            parameters = bert.layout(self.config, bert.unused_sizes(self.manifest))
            return total_bytes(list(parameters), self.options.torch_dtype)
        return arena_bytes(self.config, self.options.torch_dtype)

    @property
    def slots_bytes(self) -> int:
        """What its adapters take beside that."""
        if isinstance(self.config, BertConfig) or not self.options.adapter_slots:
            return 0
        from stoker.runtime.adapters.slot_memory import slots_bytes

        return slots_bytes(self.config, self.options)


class ModelLoad:
    """Allocates the parameters at once, unless there is an `arena` for them and, behind them, for adapter `slots`;
    raises a ColdStartError for a model that can't be loaded.

    `deliver` brings the weights from a parked `image` or from `files`, the published files' paths on this machine;
    without these someone has to `place` them chunk by chunk. With `check`, the bytes on the device are compared with
    the published checksums in the end. `restored`: its kernels need not be compiled. One thread delivers, another may
    build the engine meanwhile; what it computes waits for the weights that it reads.
    """

    def __init__(
        self,
        blueprint: Blueprint,
        files: Sequence[str] = (),
        image: HostImage | None = None,
        check: bool = False,
        restored: bool = False,
        arena: torch.Tensor | None = None,
    ) -> None:
        self.timeline = Timeline()
        self.blueprint = blueprint
        self.device = torch.device(blueprint.options.device)
        self._upload_ns: list[int] = []
        self._busy_ns = 0
        self._pin: Registration | None = None
        self._image = image
        self._check, self._restored = check, restored
        self._manifest, self._config, self._options = blueprint.manifest, blueprint.config, blueprint.options
        self.total_bytes = blueprint.arena_bytes if image else blueprint.manifest.total_bytes
        self._device_check: DeviceCheck | None = None
        self._source = MappedSource(self._manifest, [Path(file) for file in files]) if files else None
        self.slots = arena[blueprint.arena_bytes :] if arena is not None and blueprint.slots_bytes else None
        try:
            self.weights = self._allocate(None if arena is None else arena[: blueprint.arena_bytes])
            # An image is copied as it is.
            self._uploader = None if image else self._new_uploader()
        except BaseException:
            self.settle()
            raise

    @property
    def is_local(self) -> bool:
        return bool(self._image or self._source)

    @property
    def revision(self) -> str:
        return self._manifest.revision

    def chunk_bytes(self, chunk: int) -> int:
        return self._manifest.chunks[chunk].length

    def pin(self, ring: Ring) -> None:
        """Copies from the ring are asynchronous from here on, until `settle`."""
        if self.device.type == "cuda":
            with self.timeline.phase("register ring", bytes=ring.size):
                self._pin = Registration(ring.address, ring.size)

    def place(self, chunk: int, data: memoryview, pinned: bool = False) -> None:
        start = time.monotonic_ns()
        assert self._uploader is not None
        self._uploader.place(chunk, data, pinned or bool(self._pin and self._pin.active))
        end = time.monotonic_ns()
        self._upload_ns += [start, end]
        self._busy_ns += end - start

    def deliver(self, moved: Callable[[int], None]) -> None:
        """Queues all copies of weights that are on this machine; `moved` is told of each one's bytes. Raises a
        ColdStartError."""

        def place(chunk: int, data: memoryview, pinned: bool) -> None:
            self.place(chunk, data, pinned)
            moved(self.chunk_bytes(chunk))

        start = time.monotonic_ns()
        if self._image:
            weights = self.weights
            self._image.copy_to(weights.arena, self._stage_ends(), weights.arrival, moved)
            self._upload_ns = [start, time.monotonic_ns()]
        elif self._source:
            self._deliver_files(self._source, place)

    def _deliver_files(self, source: MappedSource, place: Place) -> None:
        """The checksums are a GPU's work, where there is one: sixteen host threads that read all of the weights slow
        down everything else that a start does."""
        if self.device.type != "cuda":
            source.check(range(len(self._manifest.chunks)))
        source.deliver(place)
        if self.device.type == "cuda":
            check = self._prepare_check()
            source.check([*check.converted, *check.unfit])

    def _prepare_check(self) -> "DeviceCheck":
        # Needs Triton, which a CPU's engine does without.
        from stoker.coldstart.device_check import DeviceCheck

        self._device_check = DeviceCheck(self._manifest, self.weights.targets)
        return self._device_check

    def build(self, cache: tuple[KVSize, torch.Tensor] | None = None) -> Engine | Embedder:
        """What runs requests, ready for them; `cache` is an Engine's. Raises NotEnoughMemory when that doesn't fit."""
        if isinstance(self.weights, BertWeights):
            assert isinstance(self._config, BertConfig)
            embedder = Embedder(self._config, self._options, self.weights)
            with self.timeline.phase("warm up"):
                embedder.warm_up()
            return embedder
        assert isinstance(self._config, ModelConfig)
        with self.timeline.phase("allocate KV cache") as facts:
            engine = Engine(self._config, self._options, self.weights, self._manifest.revision, cache, self.slots)
            facts["bytes"] = engine.kv.total_bytes
        # A parked model has been warmed up in this process.
        if not self._image:
            with self.timeline.phase("warm up") as facts:
                facts.update(engine.runner.warm_up(self._restored))
        return engine

    def complete(self) -> None:
        """Waits for the last copy and checksum. Raises when bytes are missing or wrong."""
        if self._uploader:
            self._uploader.finish()
        else:
            wait_for_copies(self.device)
        if self._upload_ns:
            facts = {"bytes": self.total_bytes, "busy_s": self._busy_ns / 1e9}
            self.timeline.add("upload weights", self._upload_ns[0], time.monotonic_ns(), **facts)
        if self._source:
            self._source.verify()
            self.timeline.extend(self._source.phases())
        if self._check and not self._device_check:
            self._prepare_check()
        if self._device_check:
            with self.timeline.phase("checksum on device", bytes=self._manifest.total_bytes):
                self._compare(self._device_check)
        self.weights.arrival.finish()

    def _compare(self, check: "DeviceCheck") -> None:
        with on_copy_stream(self.device):
            # Of mapped files, the source checks the others.
            wrong = check.run(unfit=self._check or not self._source)
        for number in wrong:
            chunk = self._manifest.chunks[number]
            name = self._source.name(chunk.file) if self._source else self._manifest.files[chunk.file].name
            span = (chunk.offset, chunk.offset + chunk.length)
            raise ObjectAltered(name, span, "its bytes on the device aren't the published ones")

    def fail(self, error: Exception) -> None:
        self.weights.arrival.fail(error)

    def cancel(self) -> None:
        if self._source:
            self._source.cancel()

    def settle(self) -> None:
        """Waits for copies under way and gives the host's memory back."""
        wait_for_copies(self.device)
        if self._source:
            self._source.close()
        if self._pin:
            self._pin.release()
            self._pin = None

    def _allocate(self, arena: torch.Tensor | None) -> ModelWeights | BertWeights:
        config = self._config
        with self.timeline.phase("allocate weights") as facts:
            if isinstance(config, BertConfig):
                weights = BertWeights.plan(config, self._options, bert.unused_sizes(self._manifest), arena)
            else:
                weights = replace(plan(config, self._options, arena), arrival=Arrival(stages(config)))
            facts["bytes"] = weights.arena.nbytes
        return weights

    def _new_uploader(self) -> Uploader:
        config = self._config
        stage = (lambda name: 0) if isinstance(config, BertConfig) else (lambda name: stage_of(config, name))
        return Uploader(self._manifest, self.weights.targets, self.weights.arrival, stage)

    def _stage_ends(self) -> list[int]:
        if isinstance(self.weights, BertWeights):
            return [self.weights.arena.nbytes]
        assert isinstance(self._config, ModelConfig)
        return stage_ends(self._config, self.weights)

    def facts(self, engine: Engine | Embedder) -> dict[str, Any]:
        """What is told of a model that is ready."""
        options = engine.options
        kv = engine.kv if isinstance(engine, Engine) else KVSize(0, 0)
        return {
            "revision": self._manifest.revision,
            "parameters": sum(target.numel() for target in self.weights.targets.values()),
            "parameter_bytes": self.weights.arena.nbytes,
            "host_bytes": host_bytes(engine),
            "device": options.device,
            "device_name": torch.cuda.get_device_name() if options.device == "cuda" else "cpu",
            "dtype": options.dtype,
            "threads": torch.get_num_threads(),
            "kv_blocks": kv.num_blocks,
            "kv_bytes": kv.total_bytes,
            "block_tokens": BLOCK_TOKENS,
            "max_model_len": options.max_model_len,
            "max_seqs": options.max_seqs,
            "token_budget": options.token_budget,
        }


def wait_for_copies(device: torch.device) -> None:
    if device.type == "cuda":
        copy_stream().synchronize()


def read_config(documents: Mapping[str, bytes]) -> ModelConfig | BertConfig:
    if CONFIG not in documents:
        raise UnsupportedModel(CONFIG, None, "the model was published without it")
    if any(name in ENCODERS for name in parse(documents, CONFIG).get("architectures") or ()):
        return BertConfig.from_hf(parse(documents, CONFIG), parse(documents, POOLING))
    return ModelConfig.from_hf(parse(documents, CONFIG), parse(documents, GENERATION_CONFIG))


def parse(documents: Mapping[str, bytes], name: str) -> dict[str, Any]:
    try:
        value = json.loads(documents.get(name, b"{}"))
    except ValueError as error:
        raise UnsupportedModel(name, None, f"not JSON: {error}") from error
    if not isinstance(value, dict):
        raise UnsupportedModel(name, None, "not a JSON object")
    return value


def host_bytes(engine: Engine | Embedder) -> int:
    """Of host memory, at most: adapters' copies, and what the prompt cache keeps there."""
    if isinstance(engine, Embedder):
        return 0
    block = engine.kv.block_bytes
    return (engine.adapters.host_bytes if engine.adapters else 0) + engine.options.host_cache_bytes // block * block


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
