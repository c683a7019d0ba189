"""The models of one engine process: frames from the host agent in, frames back, one step of one model at a time."""

import logging
import os
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import psutil
import torch

from stoker.coldstart.ring import Ring
from stoker.coldstart.timeline import Timeline
from stoker.runtime.encoder.embedder import Embedder
from stoker.runtime.engine.delivery import Delivery
from stoker.runtime.engine.engine import Engine
from stoker.runtime.engine.loading import Blueprint
from stoker.runtime.engine.request import Delta, EmbedRequest, GenerationRequest, SamplingParams
from stoker.runtime.pool.residents import Residents, Source, owned
from stoker.runtime.pool.shares import GAP_S
from stoker.runtime.wire import ChannelClosed, Frame

if TYPE_CHECKING:
    from stoker.runtime.adapters.adapter_file import AdapterFile

log = logging.getLogger(__name__)

DELIVERED = ("chunk", "chunks_done", "load_failed", "unload")


class Models:
    """`send` takes the frames for the agent, `remind` those that this object's threads have for the engine's thread:
    they are to be handed to `handle`. That thread calls everything but `route`. What `started` has when a model is
    loaded is told as part of its load. `limit` bounds the device memory of all models, in bytes (0: what is free)."""

    def __init__(
        self,
        send: Callable[[Frame], None],
        ring: Ring,
        remind: Callable[[Frame], None],
        started: Timeline,
        limit: int = 0,
    ) -> None:
        self._send = send
        self._remind = remind
        self._ring = ring
        self._residents = Residents(send, remind, self._tell, self._delivery, started, limit)
        self._engines = self._residents.engines
        self._books = self._residents.books
        self._parking: set[str] = set()
        self._stepped: dict[str, int] = {}

    def route(self, frame: Frame) -> bool:
        """Called by the thread that reads the channel: what concerns weights on their way goes to the thread that waits
        for it. False for a frame that is (also) for the engine's thread."""
        kind, model = frame["t"], frame.get("model", "")
        if kind in ("load", "unpark"):
            self._residents.deliveries[model] = self._delivery(model)
        delivery = self._residents.deliveries.get(model)
        if delivery and kind in DELIVERED:
            delivery.put(frame)
        elif kind == "chunk":
            self._free(model, frame["slot"])
        return kind in ("chunk", "chunks_done")

    def engine(self, model: str) -> Engine | Embedder:
        return self._engines[model]

    def wait_s(self) -> float | None:
        """How long the next step has to be waited for: 0 when there is one to compute, None when only a frame can make
        one."""
        engines = [engine for engine in self._engines.values() if isinstance(engine, Engine) and engine.has_work()]
        rests = [rest for engine in engines if (rest := engine.rest_s())]
        return 0.0 if any(self._residents.able()) else min(rests, default=None)

    def handle(self, frame: Frame) -> None:
        """Raises ChannelClosed only: a frame that makes no sense is logged, whatever is wrong with it."""
        try:
            self._dispatch(frame)
            self._residents.take_turns()
            self._residents.tidy()
        except (ChannelClosed, torch.AcceleratorError):
            raise
        except Exception:
            log.exception("frame %r for model %r was ignored", frame.get("t"), frame.get("model"))

    def _dispatch(self, frame: Frame) -> None:
        match frame["t"]:
            case "load":
                self._residents.join(frame["model"], lambda: read_load(frame))
            case "unpark":
                self._residents.join(frame["model"], lambda: self._residents.parked_source(frame))
            case "park":
                self._parking.add(frame["model"])
                self._residents.make_image(frame["model"], frame["name"])
            case "image":
                self._residents.make_image(frame["model"], frame["name"])
            case "image made":
                self._image_made(frame["model"], frame["name"], frame["error"])
            case "forget":
                self._residents.images.forget(frame["name"])
            case "nearly":
                self._residents.let_in_early(frame["model"], frame["delivery"])
            case "arrived":
                self._residents.finish(frame["model"], frame["delivery"], frame["error"])
            case "load_failed":
                self._drop(frame["model"])
            case "unload":
                self._drop(frame["model"])
                self._send({"t": "unloaded", "model": frame["model"]})
            case "tokenizer":
                self._add_grammars(frame["model"], frame["tokenizer"])
            case "export prompts" | "import prompts" | "prompts moved":
                self._residents.move_prompts(frame)
            case "submit":
                self._submit(frame["model"], frame)
            case "abort":
                self._abort(frame["model"], frame["id"])
            case "stats":
                self._send({"t": "stats", **self._stats()})
            case unknown:
                raise ValueError(f"unknown kind of frame {unknown!r}")

    def step(self) -> None:
        """One step of the model whose turn it is: of those for whom the neediest tenants wait, the one that has waited
        longest. Its tokens leave in one frame."""
        levels = {model: self._books.level(model) for model in self._residents.able()}
        if not levels:
            return
        needy = min(levels.values()) + GAP_S
        model = min((m for m in levels if levels[m] <= needy), key=lambda m: self._stepped.get(m, 0))
        self._stepped[model] = time.monotonic_ns()
        engine = self._engines[model]
        if isinstance(engine, Engine):
            self._residents.give_blocks(model, engine)
            engine.give_way(self._books.ahead(model), self._books.shares.is_shared())
        self._tell(model, step(engine))
        self._residents.take_turns()
        self._residents.tidy()

    def prepare_idle(self) -> bool:
        """Does one piece of work that makes later steps faster; False when there is none (left)."""
        may = self._residents.may_prepare
        return any(engine.prepare_idle() for model, engine in self._engines.items() if may(model))

    def _image_made(self, model: str, name: str, error: Exception | None) -> None:
        """For a model that leaves, its requests having ended, or in case that it has to make room."""
        self._residents.image_made(model, name, error)
        if model in self._parking:
            self._drop(model)
        answer = "parked" if model in self._parking else "imaged"
        self._parking.discard(model)
        self._send({"t": answer, "model": model, "error": str(error) if error else ""})

    def _drop(self, model: str) -> None:
        self._residents.drop(model)
        self._stepped.pop(model, None)

    def _delivery(self, model: str) -> Delivery:
        def notify(kind: str, error: Exception | None) -> None:
            self._remind({"t": kind, "model": model, "delivery": delivery, "error": error})

        delivery = Delivery(self._ring, lambda slot: self._free(model, slot), notify)
        return delivery

    def _free(self, model: str, slot: int) -> None:
        self._send({"t": "slot_free", "model": model, "slot": slot})

    def _submit(self, model: str, frame: Frame) -> None:
        try:
            match self._engines.get(model):
                case None:
                    raise ValueError(f"model {model!r} is not loaded")
                case Embedder() as embedder:
                    embedder.submit(EmbedRequest(frame["id"], frame["texts"]))
                case engine:
                    engine.submit(read_request(frame))
            self._books.open(model, frame["id"], tenant_of(frame), frame.get("weight", 1.0))
            self._residents.asked(model)
        except (ValueError, TypeError, KeyError) as error:
            message = f"{type(error).__name__}: {error}" if isinstance(error, KeyError) else str(error)
            self._tell(model, [Delta(frame["id"], [], "error", message)])

    def _abort(self, model: str, request: str) -> None:
        if engine := self._engines.get(model):
            engine.abort(request)
            if isinstance(engine, Embedder):
                self._books.charged(model, request, ended=True)
            elif not self._residents.is_ready(model):
                self._tell(model, engine.take_outbox())

    def _add_grammars(self, model: str, tokenizer: str) -> None:
        # Few models are ever asked for one.
        from stoker.runtime.engine.grammars import Grammars

        engine = self._engines[model]
        assert isinstance(engine, Engine)
        engine.grammars = Grammars(tokenizer, engine.config.vocab_size, engine.config.eos_token_ids)

    def _tell(self, model: str, deltas: Sequence[Delta]) -> None:
        """Charges the model's requests with the steps that ended, and sends what came out; while weights are being
        checked, it waits for that."""
        if engine := self._engines.get(model):
            self._books.book(model, engine.take_spent())
        if loading := self._residents.loads.get(model):
            loading.held += deltas
        elif deltas:
            charged = self._books.charged
            items = [[*item[:-1], charged(model, item.request_id, bool(item.finish_reason))] for item in deltas]
            self._send({"t": "deltas", "model": model, "items": items})

    def _stats(self) -> dict[str, Any]:
        residents = self._residents
        return {
            "models": {model: engine.stats() for model, engine in self._engines.items()},
            "loading": sorted(residents.loads),
            "there": sorted(residents.pool.pages.weights) if residents.pool else [],
            "parked": residents.images.table(),
            "ledger": residents.pool.table() if residents.pool else {},
            "swaps": dict(residents.pool.swaps) if residents.pool else {},
            "time": self._books.report(),
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


def tenant_of(frame: Frame) -> str:
    return frame.get("salt", b"").decode(errors="replace")


def read_load(frame: Frame) -> Source:
    plan = Blueprint.read(frame["manifest"], frame["documents"], frame["options"])
    checked, restored = frame.get("check", False), frame.get("restored", False)
    return Source(plan, frame.get("files", ()), "", checked, restored, **owned(frame))


def read_request(frame: Frame) -> GenerationRequest:
    return GenerationRequest(
        id=frame["id"],
        prompt=frame["prompt"],
        params=SamplingParams.from_dict(frame["params"]),
        prior=frame.get("prior", []),
        cache_salt=frame.get("salt", b""),
        patient=frame.get("patient", False),
        public_tokens=frame.get("public_tokens", 0),
        adapter=read_adapter(frame["adapter"]) if "adapter" in frame else None,
    )


def read_adapter(fields: Frame) -> "AdapterFile":
    from stoker.runtime.adapters.adapter_file import AdapterFile

    return AdapterFile.from_dict(fields)
