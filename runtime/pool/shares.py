"""Who has had how much of a device: each tenant's use in seconds over its weight, for whose sake work is done next."""

import time
from collections import Counter
from collections.abc import Iterable

CREDIT_S = 1.0
"""How far a tenant that asked for little may be behind those that asked for more: so long it goes before them."""
LATELY_S = 10.0
GAP_S = 0.05
"""Tenants whose levels differ by less are served side by side."""


class Shares:
    """A tenant's level rises by the seconds that it is charged, over its weight. The lowest goes first. Start-time
    fairness with a bounded credit: who comes back is lifted to `CREDIT_S` below the lowest of those that are active."""

    def __init__(self) -> None:
        self._weights: dict[str, float] = {}
        self._levels: dict[str, float] = {}
        self._active: Counter[str] = Counter()
        self._time = 0.0
        self._seen: dict[str, float] = {}

    def level(self, tenant: str) -> float:
        return self._levels.get(tenant, 0.0)

    def enter(self, tenant: str, weight: float = 1.0) -> None:
        """One more request of the tenant is here; the last one's weight holds for all of them."""
        self._weights[tenant] = weight
        if not self._active[tenant]:
            self._rise()
            self._levels[tenant] = max(self.level(tenant), self._time - CREDIT_S)
        self._active[tenant] += 1

    def leave(self, tenant: str) -> None:
        self._rise()
        self._seen[tenant] = time.monotonic()
        self._active[tenant] -= 1
        if not self._active[tenant]:
            del self._active[tenant]
            # Those that would be lifted anyway need not be remembered.
            if self.level(tenant) <= self._time - CREDIT_S:
                self._levels.pop(tenant, None)
                self._weights.pop(tenant, None)

    def is_shared(self) -> bool:
        """Several tenants have requests here, or had some lately."""
        if self._seen and min(self._seen.values()) < time.monotonic() - LATELY_S:
            self._seen = {name: at for name, at in self._seen.items() if at >= time.monotonic() - LATELY_S}
        return len(self._active | Counter(self._seen.keys())) > 1

    def charge(self, tenant: str, seconds: float) -> None:
        self._levels[tenant] = self.level(tenant) + seconds / self._weights.get(tenant, 1.0)

    def neediest(self, tenants: Iterable[str]) -> float:
        """The lowest level of these; infinite if there are none."""
        return min((self.level(tenant) for tenant in tenants), default=float("inf"))

    def _rise(self) -> None:
        """Virtual time: the lowest level among those active, never falling."""
        self._time = max(self._time, min((self.level(tenant) for tenant in +self._active), default=self._time))
