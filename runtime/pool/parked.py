"""Models that gave their device memory back and stay in pinned host memory, to be loaded again from there."""

import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass

import torch

from stoker.coldstart.host_image import HostImage
from stoker.runtime.engine.loading import Blueprint

Done = Callable[[Exception | None], None]


@dataclass(frozen=True, slots=True)
class Parked:
    """A model's bytes as they lay on the device, and what they are the bytes of."""

    image: HostImage
    blueprint: Blueprint


class ParkedModels:
    """By a name that the agent gives them. An image is made once, in a thread of its own, and kept until it is
    forgotten, whether the model is on the device meanwhile or not: parking it again copies nothing."""

    def __init__(self) -> None:
        self._parked: dict[str, Parked] = {}
        self._making: dict[str, threading.Thread] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._parked

    def make(self, model: str, name: str, blueprint: Blueprint, arena: torch.Tensor, done: Done) -> None:
        """`arena` must not change until `done` is called, in the thread; with the error, if there is one. The caller
        waits for the model's image then."""
        # Whoever hears that it is done may free the arena: the thread must not hold it any more.
        held = [arena]

        def run() -> None:
            try:
                image = HostImage(held[0].numel())
                image.fill(held[0])
            except Exception as error:
                traceback.clear_frames(error.__traceback__)
                held.clear()
                done(error)
            else:
                self._parked[name] = Parked(image, blueprint)
                held.clear()
                done(None)

        self._making[model] = threading.Thread(target=run, daemon=True, name="park")
        self._making[model].start()

    def is_making(self, model: str) -> bool:
        return model in self._making

    def wait_for(self, model: str) -> None:
        """Nothing reads the model's weights any more after this."""
        if thread := self._making.pop(model, None):
            thread.join()

    def get(self, name: str) -> Parked:
        """Raises ValueError for a name that isn't parked (any more)."""
        if name not in self._parked:
            raise ValueError(f"nothing is parked as {name!r}")
        return self._parked[name]

    def forget(self, name: str) -> None:
        """No copy from the image may be under way."""
        if parked := self._parked.pop(name, None):
            parked.image.close()

    def table(self) -> dict[str, int]:
        """Host bytes by name."""
        return {name: parked.image.size for name, parked in self._parked.items()}
