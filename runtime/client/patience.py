"""When a request that may be repeated is sent again: after the time that the gateway asks for, or a growing pause."""

import math
import random

from stoker.runtime.client.errors import StokerError, Unreachable

LOST_S = 30.0
FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 2.0
AWAY = (502, 503, 504)
BUSY = (429, 503)


class Patience:
    """Of one request. Being told to wait is endured without end, a lost gateway for LOST_S."""

    def __init__(self) -> None:
        self._lost_at: float | None = None
        self._failures = 0

    def pause(self, error: StokerError, now: float, until: float = math.inf) -> float:
        """Seconds until the next try; raises `error` when none will help, or would come after `until`."""
        pause_s = self._pause(error, now)
        if now + pause_s > until:
            raise error
        return pause_s

    def _pause(self, error: StokerError, now: float) -> float:
        if error.final:
            raise error
        if error.status in BUSY and error.retry_after_s is not None:
            self.heard()
            return error.retry_after_s * random.uniform(1, 1.25)
        if not isinstance(error, Unreachable) and error.status not in AWAY:
            raise error
        self._lost_at = now if self._lost_at is None else self._lost_at
        if now - self._lost_at > LOST_S:
            raise error
        self._failures += 1
        return min(FIRST_PAUSE_S * 2 ** (self._failures - 1), LONGEST_PAUSE_S) * random.uniform(0.5, 1)

    def heard(self) -> None:
        """The gateway answers."""
        self._lost_at, self._failures = None, 0
