"""The models of one engine process: frames from the host agent in, frames back, one round of steps at a time."""

import gc
import logging
import os
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import psutil
import torch

from stoker.coldstart.ring import Ring
from stoker.runtime.engine.engine import Engine
from stoker.runtime.engine.loading import ModelLoad, describe
from stoker.runtime.engine.request import Delta, GenerationRequest, SamplingParams
from stoker.runtime.wire import ChannelClosed, Frame

log = logging.getLogger(__name__)


class Models:
    """`send` takes the frames for the agent. One thread calls everything."""

    def __init__(self, send: Callable[[Frame], None], ring: Ring) -> None:
        self._send = send
        self._ring = ring
        self._loads: dict[str, ModelLoad] = {}
        self._engines: dict[str, Engine] = {}

    def has_work(self) -> bool:
        return any(engine.has_work() for engine in self._engines.values())

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
                self._load(frame["model"], frame)
            case "chunk":
                self._place(frame["model"], frame["chunk"], frame["slot"])
            case "chunks_done":
                self._finish(frame["model"])
            case "load_failed":
                self._drop(frame["model"])
            case "unload":
                self._drop(frame["model"])
                self._send({"t": "unloaded", "model": frame["model"]})
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
        """One step of every model that has work; its tokens leave in one frame."""
        for model, engine in self._engines.items():
            if engine.has_work() and (deltas := step(engine)):
                self._send_deltas(model, deltas)

    def prepare_idle(self) -> bool:
        """Does one piece of work that makes later steps faster; False when there is none (left)."""
        return any(engine.prepare_idle() for engine in self._engines.values())

    def _load(self, model: str, frame: Frame) -> None:
        self._drop(model)
        try:
            self._loads[model] = ModelLoad(frame["manifest"], frame["documents"], frame["options"])
        except Exception as error:
            self._load_error(model, error)
        else:
            self._send({"t": "allocated", "model": model})

    def _place(self, model: str, chunk: int, slot: int) -> None:
        """The slot goes back in any case, also for a model that is gone by now."""
        try:
            if model in self._loads:
                self._loads[model].place(chunk, self._ring.slot(slot))
        except Exception as error:
            self._load_error(model, error)
        finally:
            self._send({"t": "slot_free", "model": model, "slot": slot})

    def _finish(self, model: str) -> None:
        load = self._loads.pop(model, None)
        if load is None:
            return
        try:
            engine, phases, facts = load.finish()
        except Exception as error:
            del load
            self._load_error(model, error)
        else:
            self._engines[model] = engine
            self._send({"t": "ready", "model": model, "phases": phases, "facts": facts})

    def _load_error(self, model: str, error: Exception) -> None:
        record = describe(error)
        log.error("model %s can't be loaded: %s", model, "".join(traceback.format_exception(error)))
        # The traceback's frames hold the arena. (So would a log record with exc_info, in a handler that keeps records.)
        error.__traceback__ = None
        self._drop(model)
        self._send({"t": "load_error", "model": model, "error": record})

    def _drop(self, model: str) -> None:
        """Forgets a model in whatever state and gives its memory back. Its requests get no answer."""
        self._loads.pop(model, None)
        self._engines.pop(model, None)
        gc.collect()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()

    def _submit(self, model: str, frame: Frame) -> None:
        try:
            if model not in self._engines:
                raise ValueError(f"model {model!r} is not loaded")
            self._engines[model].submit(read_request(frame))
        except (ValueError, TypeError, KeyError) as error:
            message = f"{type(error).__name__}: {error}" if isinstance(error, KeyError) else str(error)
            self._send_deltas(model, [Delta(frame["id"], [], "error", message)])

    def _send_deltas(self, model: str, deltas: Sequence[Delta]) -> None:
        self._send({"t": "deltas", "model": model, "items": [list(delta) for delta in deltas]})

    def _stats(self) -> dict[str, Any]:
        return {
            "models": {model: engine.stats() for model, engine in self._engines.items()},
            "loading": sorted(self._loads),
            "resident_bytes": psutil.Process(os.getpid()).memory_info().rss,
            "device_bytes": torch.cuda.memory_allocated() if torch.cuda.is_initialized() else 0,
        }


def step(engine: Engine) -> list[Delta]:
    """An error that no single request is to blame for ends all of this model's requests, and no other's."""
    try:
        return engine.step()
    except torch.AcceleratorError:
        raise
    except Exception as error:
        log.exception("an engine step failed")
        return engine.fail_all(f"engine step failed: {type(error).__name__}: {error}")


def read_request(frame: Frame) -> GenerationRequest:
    return GenerationRequest(
        id=frame["id"],
        prompt=frame["prompt"],
        params=SamplingParams.from_dict(frame["params"]),
        prior=frame.get("prior", []),
        cache_salt=frame.get("salt", b""),
    )
