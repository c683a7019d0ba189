"""The models of one engine process: frames from the host agent in, frames back, one round of steps at a time."""

import gc
import logging
import os
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import psutil
import torch

from stoker.coldstart.ring import Ring
from stoker.coldstart.timeline import Timeline
from stoker.runtime.engine.delivery import Delivery
from stoker.runtime.engine.embedder import Embedder
from stoker.runtime.engine.engine import Engine
from stoker.runtime.engine.loading import Blueprint, ModelLoad, describe
from stoker.runtime.engine.parked import Parked, ParkedModels
from stoker.runtime.engine.request import Delta, EmbedRequest, GenerationRequest, SamplingParams
from stoker.runtime.engine.sizing import total_bytes
from stoker.runtime.ledger import Ledger
from stoker.runtime.wire import ChannelClosed, Frame

log = logging.getLogger(__name__)

DELIVERED = ("chunk", "chunks_done", "load_failed", "unload")


@dataclass(slots=True)
class Loading:
    """A model whose weights aren't all there and checked. `open`: it takes requests; `held`: tokens that wait."""

    load: ModelLoad
    delivery: Delivery
    open: bool = False
    held: list[Delta] = field(default_factory=list)


class Models:
    """`send` takes the frames for the agent, `remind` those that this object's threads have for the engine's thread:
    they are to be handed to `handle`. That thread calls everything but `route`. What `started` has when a model is
    loaded is told as part of its load."""

    def __init__(
        self, send: Callable[[Frame], None], ring: Ring, remind: Callable[[Frame], None], started: Timeline
    ) -> None:
        self._send = send
        self._remind = remind
        self._started = started
        self._ring = ring
        self._deliveries: dict[str, Delivery] = {}
        self._loads: dict[str, Loading] = {}
        self._engines: dict[str, Engine | Embedder] = {}
        self._blueprints: dict[str, Blueprint] = {}
        self._parked = ParkedModels()
        self._ledger: Ledger | None = None

    def route(self, frame: Frame) -> bool:
        """Called by the thread that reads the channel: what concerns weights on their way goes to the thread that waits
        for it. False for a frame that is (also) for the engine's thread."""
        kind, model = frame["t"], frame.get("model", "")
        if kind in ("load", "unpark"):
            self._deliveries[model] = self._delivery(model)
        delivery = self._deliveries.get(model)
        if delivery and kind in DELIVERED:
            delivery.put(frame)
        elif kind == "chunk":
            self._free(model, frame["slot"])
        return kind in ("chunk", "chunks_done")

    def has_work(self) -> bool:
        return any(engine.has_work() and not self._is_held(model) for model, engine in self._engines.items())

    def handle(self, frame: Frame) -> None:
        """Raises ChannelClosed only: a frame that makes no sense is logged, whatever is wrong with it."""
        try:
            self._dispatch(frame)
        except (ChannelClosed, torch.AcceleratorError):
            raise
        except Exception:
            log.exception("frame %r for model %r was ignored", frame.get("t"), frame.get("model"))

    def _dispatch(self, frame: Frame) -> None:
        match frame["t"]:
            case "load":
                self._load(frame, lambda: read_load(frame))
            case "unpark":
                self._load(frame, lambda: (self._parked.get(frame["name"]), ()))
            case "park":
                self._park(frame["model"], frame["name"])
            case "image made":
                self._leave_device(frame["model"], frame["error"])
            case "forget":
                self._parked.forget(frame["name"])
            case "nearly":
                self._let_in_early(frame["model"], frame["delivery"])
            case "arrived":
                self._finish(frame["model"], frame["delivery"], frame["error"])
            case "load_failed":
                self._drop(frame["model"])
            case "unload":
                self._drop(frame["model"])
                self._send({"t": "unloaded", "model": frame["model"]})
            case "tokenizer":
                self._add_grammars(frame["model"], frame["tokenizer"])
            case "submit":
                self._submit(frame["model"], frame)
            case "abort":
                if engine := self._engines.get(frame["model"]):
                    engine.abort(frame["id"])
            case "stats":
                self._send({"t": "stats", **self._stats()})
            case unknown:
                raise ValueError(f"unknown kind of frame {unknown!r}")

    def step(self) -> None:
        """One step of every model that has work; its tokens leave in one frame, once its weights are checked."""
        for model, engine in self._engines.items():
            if engine.has_work() and not self._is_held(model) and (deltas := step(engine)):
                self._send_deltas(model, deltas)

    def prepare_idle(self) -> bool:
        """Does one piece of work that makes later steps faster; False when there is none (left)."""
        return any(engine.prepare_idle() for model, engine in self._engines.items() if model not in self._loads)

    def _load(self, frame: Frame, read: Callable[[], tuple[Blueprint | Parked, Sequence[str]]]) -> None:
        model = frame["model"]
        if model in self._engines:
            self._drop(model, keep=self._deliveries.get(model))
        delivery = self._deliveries[model]
        try:
            load = self._begin(model, *read(), frame.get("check", False))
        except Exception as error:
            delivery.start(None)
            self._load_error(model, error)
            return
        delivery.start(load)
        self._send({"t": "allocated", "model": model})
        try:
            self._loads[model] = Loading(load, delivery)
            self._engines[model] = engine = load.build()
            if isinstance(engine, Engine):
                self._book(model, engine.kv.total_bytes)
        except Exception as error:
            load.cancel()
            del load
            self._load_error(model, error)

    def _begin(self, model: str, what: Blueprint | Parked, files: Sequence[str], check: bool) -> ModelLoad:
        blueprint, image = (what.blueprint, what.image) if isinstance(what, Parked) else (what, None)
        load = ModelLoad(blueprint, files, image, check)
        self._blueprints[model] = blueprint
        self._book(model, blueprint.arena_bytes)
        return load

    def _book(self, model: str, size: int) -> None:
        """Device bytes that `model` has from here on."""
        self._ledger = self._ledger or Ledger(total_bytes(self._blueprints[model].options.device))
        self._ledger.reserve(model, size)
        self._ledger.commit(model, size)

    def _park(self, model: str, name: str) -> None:
        """Its requests must have ended. Answered by "parked", with an error if it is gone instead."""

        def made(error: Exception | None) -> None:
            self._remind({"t": "image made", "model": model, "error": error})

        try:
            if name in self._parked:
                made(None)
            else:
                self._parked.make(name, self._blueprints[model], self._engines[model].arena, made)
        except (KeyError, AttributeError) as error:
            made(error)

    def _leave_device(self, model: str, error: Exception | None) -> None:
        if error:
            log.error("model %s can't be parked: %s", model, error)
            error.__traceback__ = None
        self._drop(model)
        self._send({"t": "parked", "model": model, "error": str(error) if error else ""})

    def _let_in_early(self, model: str, delivery: Delivery) -> None:
        """Its first step would wait for weights, and all other models with it: only when those have nothing to do."""
        loading = self._loads.get(model)
        others = any(engine.has_work() for name, engine in self._engines.items() if name != model)
        if loading and loading.delivery is delivery and not others:
            self._let_in(model, loading)

    def _let_in(self, model: str, loading: "Loading") -> None:
        if not loading.open:
            loading.open = True
            self._send({"t": "ready", "model": model, "facts": loading.load.facts(self._engines[model])})

    def _finish(self, model: str, delivery: Delivery, error: Exception | None) -> None:
        loading = self._loads.get(model)
        if loading is None or loading.delivery is not delivery:
            return
        if error:
            del loading
            self._load_error(model, error)
            return
        self._let_in(model, loading)
        phases = [*self._started.take(), *loading.load.timeline.records()]
        self._send({"t": "loaded", "model": model, "phases": phases})
        del self._loads[model]
        if loading.held:
            self._send_deltas(model, loading.held)

    def _load_error(self, model: str, error: Exception) -> None:
        record = describe(error)
        log.error("model %s can't be loaded: %s", model, "".join(traceback.format_exception(error)))
        # The traceback's frames hold the arena. (So would a log record with exc_info, in a handler that keeps records.)
        error.__traceback__ = None
        self._drop(model)
        self._send({"t": "load_error", "model": model, "error": record})

    def _drop(self, model: str, keep: Delivery | None = None) -> None:
        """Forgets a model in whatever state and gives its memory back. Its requests get no answer."""
        if loading := self._loads.pop(model, None):
            loading.load.cancel()
            loading.delivery.put({"t": "unload", "model": model})
            loading.delivery.join()
            del loading
        if keep is None and (delivery := self._deliveries.pop(model, None)):
            delivery.put({"t": "unload", "model": model})
            # Until it has given the host's memory back, it holds the weights too.
            delivery.join()
        self._engines.pop(model, None)
        self._blueprints.pop(model, None)
        if self._ledger:
            self._ledger.release(model)
        gc.collect()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()

    def _delivery(self, model: str) -> Delivery:
        def notify(kind: str, error: Exception | None) -> None:
            self._remind({"t": kind, "model": model, "delivery": delivery, "error": error})

        delivery = Delivery(self._ring, lambda slot: self._free(model, slot), notify)
        return delivery

    def _free(self, model: str, slot: int) -> None:
        self._send({"t": "slot_free", "model": model, "slot": slot})

    def _is_held(self, model: str) -> bool:
        """Tokens wait for the rest of the weights to be checked: further ones needn't be computed yet."""
        return model in self._loads and bool(self._loads[model].held)

    def _submit(self, model: str, frame: Frame) -> None:
        try:
            match self._engines.get(model):
                case None:
                    raise ValueError(f"model {model!r} is not loaded")
                case Embedder() as embedder:
                    embedder.submit(EmbedRequest(frame["id"], frame["texts"]))
                case engine:
                    engine.submit(read_request(frame))
        except (ValueError, TypeError, KeyError) as error:
            message = f"{type(error).__name__}: {error}" if isinstance(error, KeyError) else str(error)
            self._send_deltas(model, [Delta(frame["id"], [], "error", message)])

    def _add_grammars(self, model: str, tokenizer: str) -> None:
        # Few models are ever asked for one.
        from stoker.runtime.engine.grammars import Grammars

        engine = self._engines[model]
        assert isinstance(engine, Engine)
        engine.grammars = Grammars(tokenizer, engine.config.vocab_size, engine.config.eos_token_ids)

    def _send_deltas(self, model: str, deltas: Sequence[Delta]) -> None:
        if loading := self._loads.get(model):
            loading.held += deltas
            return
        self._send({"t": "deltas", "model": model, "items": [list(delta) for delta in deltas]})

    def _stats(self) -> dict[str, Any]:
        return {
            "models": {model: engine.stats() for model, engine in self._engines.items()},
            "loading": sorted(self._loads),
            "parked": self._parked.table(),
            "ledger": self._ledger.table() if self._ledger else {},
            "resident_bytes": psutil.Process(os.getpid()).memory_info().rss,
            "device_bytes": torch.cuda.memory_allocated() if torch.cuda.is_initialized() else 0,
        }


def step(engine: Engine | Embedder) -> list[Delta]:
    """An error that no single request is to blame for ends all of this model's requests, and no other's."""
    try:
        return engine.step()
    except torch.AcceleratorError:
        raise
    except Exception as error:
        log.exception("an engine step failed")
        return engine.fail_all(f"engine step failed: {type(error).__name__}: {error}")


def read_load(frame: Frame) -> tuple[Blueprint, Sequence[str]]:
    return Blueprint.read(frame["manifest"], frame["documents"], frame["options"]), frame.get("files", ())


def read_request(frame: Frame) -> GenerationRequest:
    return GenerationRequest(
        id=frame["id"],
        prompt=frame["prompt"],
        params=SamplingParams.from_dict(frame["params"]),
        prior=frame.get("prior", []),
        cache_salt=frame.get("salt", b""),
    )
