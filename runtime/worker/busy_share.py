"""A replica's busy time, split over the jobs it holds: at each instant all of them share it equally, so that what the
jobs were given adds up to the time in which there were any."""

import time
from collections.abc import Callable


class BusyShare:
    """Virtual time as in generalized processor sharing (Parekh and Gallager, 1993): it advances by 1/n of a second
    while n jobs are held, and a job's share is how far it went meanwhile."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._virtual = 0.0
        self._at = clock()
        self._begun: dict[str, float] = {}

    def begin(self, job_id: str) -> None:
        self._advance()
        self._begun[job_id] = self._virtual

    def end(self, job_id: str) -> float:
        """Seconds; 0 for a job that had not begun or has ended already."""
        self._advance()
        return self._virtual - self._begun.pop(job_id, self._virtual)

    def _advance(self) -> None:
        now = self._clock()
        if self._begun:
            self._virtual += (now - self._at) / len(self._begun)
        self._at = now
