"""The models of one engine process, on its device or not: how they come, take turns, and go.

A model whose weights aren't on the device keeps its engine, with all requests that wait in it. Only weights and KV
blocks are taken away: nothing is copied back, as weights don't change and what was computed can be computed again.
"""

import gc
import logging
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from stoker.coldstart.timeline import Timeline
from stoker.coldstart.upload import copy_stream
from stoker.runtime.encoder.embedder import Embedder
from stoker.runtime.engine.delivery import Delivery
from stoker.runtime.engine.engine import Engine
from stoker.runtime.engine.loading import Blueprint, ModelLoad, describe
from stoker.runtime.engine.request import Delta
from stoker.runtime.pool.books import Books
from stoker.runtime.pool.device_pool import Demand, DevicePool
from stoker.runtime.pool.joining import cache_of, member_of, open_pool
from stoker.runtime.pool.parked import ParkedModels
from stoker.runtime.pool.prompt_exchange import PromptExchange
from stoker.runtime.pool.turns import Swap
from stoker.runtime.wire import Frame

log = logging.getLogger(__name__)

LOOK_S = 0.01
AnyEngine = Engine | Embedder


@dataclass(slots=True)
class Source:
    """What a model is and where its weights come from: `image` is the name of their copy in host memory, `files` are
    the published files on this machine; with none of these they come once, through the ring. Whose it is, and whether
    it is to be `kept` on the device for them, the agent says."""

    blueprint: Blueprint
    files: Sequence[str] = ()
    image: str = ""
    check: bool = False
    restored: bool = False
    owner: str = ""
    kept: bool = False


@dataclass(slots=True)
class Loading:
    """A model whose weights aren't all there and checked. `first`: nor were they ever. `open`: it computes; `held`:
    tokens that wait."""

    load: ModelLoad
    delivery: Delivery
    first: bool
    open: bool = False
    held: list[Delta] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)


class Residents:
    """`tell` is given what engines find when they are interrupted, `new_delivery` makes a load's thread. All is called
    by one thread but `deliveries`, which another one may fill: those are made before their models are known."""

    def __init__(
        self,
        send: Callable[[Frame], None],
        remind: Callable[[Frame], None],
        tell: Callable[[str, Sequence[Delta]], None],
        new_delivery: Callable[[str], Delivery],
        started: Timeline,
        limit: int,
    ) -> None:
        self.engines: dict[str, AnyEngine] = {}
        self.loads: dict[str, Loading] = {}
        self.deliveries: dict[str, Delivery] = {}
        self.images = ParkedModels()
        self.books = Books()
        self.prompts = PromptExchange(send, remind)
        self.pool: DevicePool | None = None
        self._sources: dict[str, Source] = {}
        self._wishes: set[str] = set()
        self._send = send
        self._remind = remind
        self._tell = tell
        self._new_delivery = new_delivery
        self._started = started
        self._limit = limit
        self._untidy = False
        self._next_look = 0.0

    def join(self, model: str, read: Callable[[], Source]) -> None:
        """A model that is to be loaded as soon as there is room."""
        if model in self._sources:
            self.drop(model, keep=True)
        try:
            source = read()
            plan = source.blueprint
            self.pool = self.pool or open_pool(plan, self._limit)
            member = member_of(model, plan, self.pool)
            self.pool.join(replace(member, owner=source.owner, kept=source.kept))
            self._sources[model] = source
            self._wish_for_images()
        except Exception as error:
            self.deliveries[model].start(None)
            self.fail(model, error)

    def drop(self, model: str, keep: bool = False) -> None:
        """Forgets a model in whatever state and gives its memory back. Its requests get no answer. `keep`s a delivery
        that is for its successor."""
        if loading := self.loads.pop(model, None):
            loading.load.cancel()
            loading.delivery.put({"t": "unload", "model": model})
            loading.delivery.join()
            self._end(model, loading)
        if not keep and (delivery := self.deliveries.pop(model, None)):
            delivery.put({"t": "unload", "model": model})
            # Until it has given the host's memory back, it uses the weights' memory too.
            delivery.join()
        self.images.wait_for(model)
        self.prompts.drop(model)
        if engine := self.engines.pop(model, None):
            # Nothing is computed in its pages any more after this.
            engine.fail_all("the model was unloaded")
        self._sources.pop(model, None)
        self._wishes.discard(model)
        self.books.close(model)
        if self.pool:
            self.pool.quit(model)
        self._untidy = True

    def tidy(self) -> None:
        """After models were dropped, and nobody is in the midst of that: what nobody needs goes back to the driver.
        With the last model, that is the whole arena."""
        if not self._untidy:
            return
        self._untidy = False
        if self.pool and not self.pool.members:
            self.pool = None
        gc.collect()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()

    def fail(self, model: str, error: Exception) -> None:
        record = describe(error)
        log.error("model %s can't be loaded: %s", model, "".join(traceback.format_exception(error)))
        error.__traceback__ = None
        self.drop(model)
        self._send({"t": "load_error", "model": model, "error": record})

    def asked(self, model: str) -> None:
        """A request for it has come in."""
        assert self.pool is not None
        self.pool.asked(model, alone=self.books.requests(model) == 1)

    def is_ready(self, model: str) -> bool:
        """Its weights are there and checked."""
        return model not in self.loads and self.pool is not None and self.pool.is_there(model)

    def may_prepare(self, model: str) -> bool:
        """Its pages are its own, though weights may be on their way to them for the first time."""
        loading = self.loads.get(model)
        return loading.first if loading else self.is_ready(model)

    def able(self) -> Iterator[str]:
        """Models that have work and can do it."""
        for model, engine in self.engines.items():
            rests = isinstance(engine, Engine) and engine.rest_s() > 0
            if engine.has_work() and not rests and (self.is_ready(model) or self._may_begin(model)):
                yield model

    def _may_begin(self, model: str) -> bool:
        """Before all weights are there. Once it has tokens that wait, further ones needn't be computed yet."""
        loading = self.loads.get(model)
        return loading is not None and loading.open and not loading.held

    def give_blocks(self, model: str, engine: Engine) -> None:
        """What the engine's next step wants, as far as it can be had."""
        assert self.pool is not None
        wanted = engine.scheduler.wanted_blocks()
        engine.add_blocks(self.pool.more_blocks(model, wanted))
        for other in self.pool.hogs(model):
            self._interrupt(other)
            engine.add_blocks(self.pool.more_blocks(model, wanted))

    def take_turns(self) -> None:
        """Carries out the next swap, if it is time for one. One at a time: two would halve each other's speed. But what
        comes for the first time may take long, and holds up nobody."""
        if self.pool is None or not all(loading.first for loading in self.loads.values()):
            return
        away = [model for model in self._sources if not self.pool.is_there(model)]
        if not any(model not in self.engines or self.books.requests(model) for model in away):
            return
        # While something runs, there will be another look.
        if time.monotonic() < self._next_look and any(True for _ in self.able()):
            return
        if swap := self.pool.plan({model: self._demand(model) for model in self._sources}):
            self._swap(self.pool, swap)
        else:
            self._next_look = time.monotonic() + LOOK_S

    def _demand(self, model: str) -> Demand:
        """A model that was never there is wanted by itself."""
        engine, source = self.engines.get(model), self._sources[model]
        queued = self.books.requests(model) if engine else 1
        comes_back = bool(source.image or source.files)
        movable = comes_back and self.is_ready(model) and not self.images.is_making(model)
        return Demand(queued, self.books.level(model), movable, engine.redo_s if isinstance(engine, Engine) else 0.0)

    def _swap(self, pool: DevicePool, swap: Swap) -> None:
        for model in swap.victims:
            self._interrupt(model)
            pool.leave(model)
        for model in pool.crossed(swap.model, swap.start):
            self._interrupt(model)
        self._bring(swap.model, pool.enter(swap.model, swap.start))

    def _interrupt(self, model: str) -> None:
        self.prompts.wait_for(model)
        self._tell(model, self.engines[model].suspend())

    def _bring(self, model: str, arena: torch.Tensor) -> None:
        engine = self.engines.get(model)
        if engine:
            self.deliveries[model] = self._new_delivery(model)
            self.books.wait_for_swap(model)
        delivery = self.deliveries[model]
        try:
            load = self._load(self._sources[model], arena)
        except Exception as error:
            delivery.start(None)
            self.fail(model, error)
            return
        self.books.meter.begin("swap" if engine else "load")
        self.loads[model] = Loading(load, delivery, first=not engine)
        delivery.start(load)
        if engine:
            engine.resume(load.weights)  # type: ignore[arg-type]
            if isinstance(engine, Engine) and engine.adapters and load.slots is not None:
                engine.adapters.rebind(load.slots)
        else:
            self._send({"t": "allocated", "model": model})
            self._build(model, load)

    def _load(self, source: Source, arena: torch.Tensor) -> ModelLoad:
        image = self.images.get(source.image).image if source.image else None
        if arena.is_cuda:
            # What is queued may still write to these pages.
            copy_stream().wait_stream(torch.cuda.current_stream())
        files = () if image else source.files
        return ModelLoad(source.blueprint, files, image, source.check, source.restored, arena)

    def _build(self, model: str, load: ModelLoad) -> None:
        assert self.pool is not None
        try:
            self.engines[model] = engine = load.build(cache_of(self._sources[model].blueprint, model, self.pool))
            if isinstance(engine, Engine):
                engine.runner.limit_graphs(self.pool.graph_bytes(model))
                self.pool.members[model].cache = engine.pool
                self.give_blocks(model, engine)
        except Exception as error:
            load.cancel()
            del load
            self.fail(model, error)

    def let_in_early(self, model: str, delivery: Delivery) -> None:
        """Its first step would wait for weights, and all other models with it: only when those have nothing to do."""
        loading = self.loads.get(model)
        if loading and loading.delivery is delivery and not any(other != model for other in self.able()):
            self._let_in(model, loading)

    def _let_in(self, model: str, loading: Loading) -> None:
        if not loading.open and loading.first:
            self._send({"t": "ready", "model": model, "facts": loading.load.facts(self.engines[model])})
        loading.open = True

    def finish(self, model: str, delivery: Delivery, error: Exception | None) -> None:
        """All weights are there, or won't be."""
        loading = self.loads.get(model)
        if loading is None or loading.delivery is not delivery:
            return
        if error:
            del loading
            self.fail(model, error)
            return
        self._let_in(model, loading)
        if loading.first:
            phases = [*self._started.take(), *loading.load.timeline.records()]
            self._send({"t": "loaded", "model": model, "phases": phases})
        del self.loads[model]
        self._end(model, loading)
        self._tell(model, loading.held)
        delivery.told()
        self._wish_for_images()

    def _end(self, model: str, loading: Loading) -> None:
        assert self.pool is not None
        self.books.wait_for_swap(model, over=True)
        self.books.meter.end("load" if loading.first else "swap")
        if self.pool.is_there(model):
            self.pool.settle(model, 0 if loading.first else time.monotonic() - loading.began)

    def _wish_for_images(self) -> None:
        """Of models that are to leave the device and come back quickly, once not all fit; the agent says how its
        memory is to be used."""
        for model, source in self._sources.items() if self.pool and self.pool.is_crowded() else ():
            if not source.image and model not in self._wishes and self.is_ready(model):
                self._wishes.add(model)
                self._send({"t": "wants_image", "model": model})

    def make_image(self, model: str, name: str) -> None:
        """Copies a model's weights into host memory, and reminds of it when they are there, or can't be. Until then
        they stay where they are."""

        def made(error: Exception | None) -> None:
            self._remind({"t": "image made", "model": model, "name": name, "error": error})

        if self.images.is_making(model):
            return
        if name in self.images:
            made(None)
        elif model in self.engines and self.is_ready(model):
            self.images.make(model, name, self._sources[model].blueprint, self.engines[model].arena, made)
        else:
            made(ValueError(f"model {model} is not on the device"))

    def move_prompts(self, frame: Frame) -> None:
        """Of the prompt cache, to the store or back; while the model isn't on the device, host memory only."""
        model, pool = frame["model"], self.pool
        more_blocks = partial(pool.more_blocks, model) if pool and pool.is_there(model) else None
        self.prompts.handle(model, self.engines.get(model), frame, more_blocks)

    def image_made(self, model: str, name: str, error: Exception | None) -> None:
        self.images.wait_for(model)
        if error:
            log.error("model %s has no image in host memory: %s", model, error)
            error.__traceback__ = None
            self._wishes.discard(model)
        elif source := self._sources.get(model):
            source.image = name

    def parked_source(self, frame: Frame) -> Source:
        """Raises ValueError for a name that isn't parked (any more)."""
        name = frame["name"]
        parked = Source(self.images.get(name).blueprint, image=name, check=frame.get("check", False))
        return replace(parked, **owned(frame))


def owned(frame: Frame) -> dict[str, Any]:
    return {name: frame[name] for name in ("owner", "kept") if name in frame}
