"""Which parts of a model have arrived on their device: what computes waits for the part that it is about to read."""

import threading

import torch


class Arrival:
    """Stages are parts of a model in the order in which a forward pass reads them. One thread issues copies and says
    so; any thread may wait. `done` only when everything is in place and verified."""

    def __init__(self, stages: int) -> None:
        self.stages = stages
        self._changed = threading.Condition()
        self._events: list[torch.cuda.Event | None] = [None] * stages
        self._issued = [False] * stages
        self._failure: Exception | None = None
        self.done = not stages

    def issued(self, stage: int, event: torch.cuda.Event | None) -> None:
        """`event` is behind the stage's last copy; None when the copies are complete."""
        with self._changed:
            self._events[stage], self._issued[stage] = event, True
            self._changed.notify_all()

    def finish(self) -> None:
        with self._changed:
            self.done = True
            self._changed.notify_all()

    def fail(self, error: Exception) -> None:
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()

    def wait(self, stage: int) -> None:
        """Lets the current stream wait for a stage. Returns as soon as its copies are on their way, and raises the
        load's error when they never will be."""
        if self.done:
            return
        with self._changed:
            self._changed.wait_for(lambda: self._failure or self._issued[stage])
            if self._failure:
                raise self._failure
            event = self._events[stage]
        if event is not None:
            torch.cuda.current_stream().wait_event(event)
