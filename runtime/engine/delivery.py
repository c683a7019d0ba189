"""Brings one model's weights to the device in a thread of its own, while the engine's thread serves other models."""

import logging
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from queue import Empty, SimpleQueue

import torch

from stoker.coldstart.failures import FetchCancelled
from stoker.coldstart.ring import Ring
from stoker.coldstart.upload import mark
from stoker.runtime.engine.loading import ModelLoad
from stoker.runtime.wire import ChannelClosed, Frame

NEAR_S = 0.5
"""Requests are let in when the rest of the weights is likely to arrive within this time: the engine's thread, which
then waits for them, is held up no longer."""
POLL_S = 0.0005
SETTLE_S = 5.0
"""After this time, if not before, what a load has registered with CUDA is let go. It takes a tenth of a second or more,
and holds up what the engine's thread asks of the driver: first tokens leave before."""
OVER = ("chunks_done", "load_failed", "unload")

log = logging.getLogger(__name__)


class Delivery:
    """`put` takes the frames about this load, from any thread and also before `start`. `notify` is told "nearly" once,
    and "arrived" at the end; `free` gets every slot of the ring back, whatever happens."""

    def __init__(
        self, ring: Ring, free: Callable[[int], None], notify: Callable[[str, Exception | None], None]
    ) -> None:
        self._ring = ring
        self._free = free
        self._notify = notify
        self._intake: SimpleQueue[Frame] = SimpleQueue()
        self._load: ModelLoad | None = None
        self._busy: deque[tuple[torch.cuda.Event, int]] = deque()
        self._bytes = 0
        self._began_ns = 0
        self._near = False
        self._closing = threading.Lock()
        self._closed = False
        self._told = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="weights")

    def put(self, frame: Frame) -> None:
        with self._closing:
            if not self._closed:
                self._intake.put(frame)
            elif frame["t"] == "chunk":
                self._free(frame["slot"])
        if frame["t"] in ("load_failed", "unload"):
            self._told.set()
            if load := self._load:
                load.cancel()

    def told(self) -> None:
        """Of the end of the load, whoever waited for it."""
        self._told.set()

    def start(self, load: ModelLoad | None) -> None:
        """None: there is nothing to load into, but slots are still given back."""
        self._load = load
        self._thread.start()

    def join(self) -> None:
        """Nothing writes to the weights any more after this; ends soon only when the load is over or cancelled."""
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        load = self._load
        try:
            if load:
                self._notify("arrived", without_locals(self._deliver(load)))
                self._told.wait(SETTLE_S)
                load.settle()
                self._load = None
            if not load or not load.is_local:
                del load
                self._give_back_the_rest()
        except ChannelClosed:
            log.info("the host agent is gone")

    def _deliver(self, load: ModelLoad) -> Exception | None:
        try:
            self._began_ns = time.monotonic_ns()
            if load.is_local:
                load.deliver(lambda size: self._moved(load, size))
            else:
                self._take_from_ring(load)
            load.complete()
            self._free_copied(wait=True)
        except Exception as error:
            load.fail(error)
            # Nothing may be copied into memory that is given back.
            load.settle()
            self._free_copied(wait=True)
            return error
        return None

    def _take_from_ring(self, load: ModelLoad) -> None:
        load.pin(self._ring)
        while True:
            try:
                frame = self._intake.get(timeout=POLL_S if self._busy else None)
            except Empty:
                self._free_copied()
                continue
            if frame["t"] in OVER:
                self._intake.put(frame)
                break
            self._take_slot(load, frame)
            self._free_copied()
        if frame["t"] != "chunks_done":
            raise FetchCancelled(load.revision, None, "the load was cancelled")

    def _take_slot(self, load: ModelLoad, frame: Frame) -> None:
        slot = frame["slot"]
        try:
            load.place(frame["chunk"], self._ring.slot(slot))
            self._moved(load, load.chunk_bytes(frame["chunk"]))
        except BaseException:
            self._free(slot)
            raise
        if event := mark(load.device):
            self._busy.append((event, slot))
        else:
            self._free(slot)

    def _moved(self, load: ModelLoad, size: int) -> None:
        self._bytes += size
        left = load.total_bytes - self._bytes
        if not self._near and (time.monotonic_ns() - self._began_ns) * left <= NEAR_S * 1e9 * self._bytes:
            self._near = True
            self._notify("nearly", None)

    def _free_copied(self, wait: bool = False) -> None:
        while self._busy and (wait or self._busy[0][0].query()):
            event, slot = self._busy.popleft()
            event.synchronize()
            self._free(slot)

    def _give_back_the_rest(self) -> None:
        """What is still under way to a load that failed, until it is said that this was all; later ones are given back
        where they come in."""
        while (frame := self._intake.get())["t"] not in OVER:
            self._free(frame["slot"])
        with self._closing:
            self._closed = True
            while not self._intake.empty():
                if (frame := self._intake.get())["t"] == "chunk":
                    self._free(frame["slot"])


def without_locals(error: Exception | None) -> Exception | None:
    """An error that outlives its thread must not hold the weights by what its frames knew."""
    if error:
        traceback.clear_frames(error.__traceback__)
    return error
