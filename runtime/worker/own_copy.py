"""A model's copy in its host's memory as its replica sees it: from there it comes back to the device, which it left for
other models, or because nobody asked for it."""

import asyncio
import contextlib
import logging
from typing import Any

from tokenizers import Tokenizer

from stoker.runtime.worker.engine_link import EngineDied, EngineLink
from stoker.runtime.worker.parking import Parked, Parking

log = logging.getLogger("stoker.worker")


class OwnCopy:
    """The engine process makes it; `Parking` knows what room there is. `name` and `size` are set when they are known,
    the size in bytes."""

    def __init__(self, model: str, parking: Parking, engine: EngineLink) -> None:
        self.name = ""
        self.size = 0
        self._model = model
        self._parking = parking
        self._engine = engine
        self._place: Parked | None = None
        self._parked: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def borrow(self) -> Parked | None:
        """What an earlier replica of the same model left behind."""
        self._place = await self._parking.borrow(self.name, self._engine)
        return self._place

    def discard(self) -> None:
        """It isn't there after all."""
        if self._place:
            self._parking.discard(self._place)

    def grant(self, tokenizer: Tokenizer) -> None:
        """The device's models don't all fit on it: this one can come back quickly if there is room for it here."""
        if self._place is None and self._offer(tokenizer):
            with contextlib.suppress(EngineDied):
                self._engine.send({"t": "image", "model": self._model, "name": self.name})

    def imaged(self, error: str) -> None:
        if self._place and error:
            self._parking.discard(self._place)
            self._parking.give_back(self._place)
            self._place = None
        elif self._place:
            self._place.made.set()

    async def park(self, tokenizer: Tokenizer) -> bool:
        """The model leaves the device for good, and is kept for whoever asks for it next. False: there is no room."""
        place = self._place or self._offer(tokenizer)
        if place is None:
            return False
        try:
            self._engine.send({"t": "park", "model": self._model, "name": place.name})
            await self._parked
            place.made.set()
        except EngineDied as error:
            log.warning("model %s is not parked: %s", self._model, error)
            self._parking.discard(place)
        return True

    def parked(self, error: str) -> None:
        """What the engine process said of it, or that it died."""
        if not self._parked.done() and error:
            self._parked.set_exception(EngineDied(error))
            self._parked.exception()
        elif not self._parked.done():
            self._parked.set_result(None)

    def know(self, facts: dict[str, Any]) -> None:
        """What the engine process says of a model that is ready. Adapters and cached prompts are in this memory too."""
        self.size = facts["parameter_bytes"]
        if size := facts["host_bytes"]:
            self._parking.take(self._model, size)

    def release(self) -> None:
        """The replica needs it no more."""
        self._parking.give_up(self._model)
        if self._place:
            if not self._place.made.is_set():
                self._parking.discard(self._place)
            self._parking.give_back(self._place)

    def _offer(self, tokenizer: Tokenizer) -> Parked | None:
        self._place = self._parking.offer(self.name, self._engine, tokenizer, self.size)
        return self._place
