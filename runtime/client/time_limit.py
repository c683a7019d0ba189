"""How long a caller waits for one call."""

import math
import time
from typing import Any

import httpx

from stoker.runtime.client.errors import WaitTimeout
from stoker.runtime.client.messages import decoded, waiting

ACCEPTED = 202


class TimeLimit:
    """`seconds` from now on; None for ever. `until` is its end on the monotonic clock."""

    def __init__(self, seconds: float | None) -> None:
        self._began = time.monotonic()
        self.until = self._began + (math.inf if seconds is None else seconds)

    def asked(self, options: dict[str, Any]) -> dict[str, Any]:
        """The options of a request that is answered by then, with a job that goes on when it has not ended."""
        left_s = max(0.0, self.until - time.monotonic())
        return options if left_s == math.inf else waiting(left_s, **options)

    def returned(self, answer: httpx.Response) -> Any:
        """What was called returned. Raises WaitTimeout."""
        if answer.status_code == ACCEPTED:
            raise WaitTimeout(decoded(answer), time.monotonic() - self._began)
        return decoded(answer)
