"""The requests of one device: whose they are, which model they are for, and what of the device's time they have had."""

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from stoker.runtime.pool.meter import Charge, Meter, Spent
from stoker.runtime.pool.shares import GAP_S, Shares

PREFILL, DECODE, SWAP = range(3)


@dataclass(slots=True)
class Account:
    """Nanoseconds of prefill, decoding and swaps that one request was charged with."""

    tenant: str
    had: list[int] = field(default_factory=lambda: [0, 0, 0])


class Books:
    """Names of requests are unique within their model. What is charged and what the meter calls idle, load, wasted, or
    a swap that nobody waited for, is all the time there was."""

    def __init__(self, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self.shares = Shares()
        self.meter = Meter(clock, self._charge_swap)
        self._accounts: defaultdict[str, dict[str, Account]] = defaultdict(dict)
        self._waiting: dict[str, list[Account]] = {}

    def open(self, model: str, request: str, tenant: str, weight: float = 1.0) -> None:
        if request not in self._accounts[model]:
            self._accounts[model][request] = Account(tenant)
            self.shares.enter(tenant, weight)

    def book(self, model: str, steps: Sequence[Spent]) -> None:
        """Steps of one model, in the order of their ends, each charged to its requests. What nobody wanted any more is
        wasted."""
        accounts = self._accounts[model]
        for parts, begin_ns, end_ns in steps:
            left = taken = self.meter.step(begin_ns, end_ns)
            scale = taken / sum(weight for _, weight, _ in parts) if parts else 0.0
            tenants: dict[str, int] = {}
            for request, weight, is_prefill in parts:
                if (account := accounts.get(request)) is not None:
                    share = int(weight * scale)
                    account.had[PREFILL if is_prefill else DECODE] += share
                    tenants[account.tenant] = tenants.get(account.tenant, 0) + share
                    left -= share
            self.meter.totals["wasted"] += left
            for tenant, nanoseconds in tenants.items():
                self.shares.charge(tenant, nanoseconds / 1e9)

    def charged(self, model: str, request: str, ended: bool) -> Charge:
        """What a request has had up to now. Once it has ended, nothing is known of it any more."""
        account = self._accounts[model].get(request)
        if account is None:
            return Charge()
        if ended:
            del self._accounts[model][request]
            self.shares.leave(account.tenant)
            self.meter.totals["charged"] += sum(account.had)
        prefill, decode, swap = account.had
        return Charge(prefill // 1000, decode // 1000, swap // 1000)

    def close(self, model: str) -> None:
        """The model is gone, and its requests with it."""
        for request in list(self._accounts.get(model, ())):
            self.charged(model, request, ended=True)
        self._accounts.pop(model, None)

    def wait_for_swap(self, model: str, over: bool = False) -> None:
        """Those who wait for this model now pay for its coming, in equal parts."""
        self.meter.advance()
        self._waiting.pop(model, None)
        if not over:
            self._waiting[model] = list(self._accounts[model].values())

    def requests(self, model: str) -> int:
        return len(self._accounts.get(model, ()))

    def level(self, model: str) -> float:
        """Of the neediest tenant that has requests for the model; 0 if nobody has."""
        tenants = self._tenants(model)
        return self.shares.neediest(tenants) if tenants else 0.0

    def ahead(self, model: str) -> set[str]:
        """Tenants with requests for the model that have had so much more than its neediest that they give way."""
        tenants = self._tenants(model)
        if len(tenants) < 2:
            return set()
        limit = self.shares.neediest(tenants) + GAP_S
        return {tenant for tenant in tenants if self.shares.level(tenant) > limit}

    def report(self) -> dict[str, int]:
        """Microseconds since the start, by what they went to: busy + swap + load + idle = wall. `charged` is what
        requests that ended were told, `open` what those here have had."""
        self.meter.advance()
        spent = {
            kind: self.meter.totals[kind] // 1000 for kind in ("busy", "swap", "load", "idle", "charged", "wasted")
        }
        running = sum(sum(account.had) for accounts in self._accounts.values() for account in accounts.values())
        return {**spent, "open": running // 1000, "wall": self.meter.wall_ns() // 1000}

    def _tenants(self, model: str) -> set[str]:
        return {account.tenant for account in self._accounts.get(model, {}).values()}

    def _charge_swap(self, nanoseconds: int) -> None:
        """To those that are still there; what they can't be told is nobody's."""
        waiting = [account for accounts in self._waiting.values() for account in accounts]
        for account in waiting:
            account.had[SWAP] += nanoseconds // len(waiting)
            self.shares.charge(account.tenant, nanoseconds / len(waiting) / 1e9)
