"""Idle models that stay in a host's memory: which of them, for how long, and how a new replica finds its own again."""

import asyncio
import contextlib
import hashlib
import logging
from dataclasses import asdict, dataclass, field

import psutil
from tokenizers import Tokenizer

from stoker.queue.records import pack
from stoker.runtime.ledger import Ledger
from stoker.runtime.settings import Settings
from stoker.runtime.spec import ModelOptions
from stoker.runtime.worker.engine_link import EngineDied, EngineLink

PARK_S = 300.0

log = logging.getLogger("stoker.worker")


def parking_name(revision: str, options: ModelOptions) -> str:
    """The same for models whose bytes on a device are the same."""
    return hashlib.sha256(revision.encode() + pack(asdict(options))).hexdigest()[:32]


@dataclass(eq=False, slots=True)
class Parked:
    """One model in the host memory of one engine process, `pid`, which is kept alive for it. `made` when it is there;
    `users` replicas have it on the device meanwhile."""

    name: str
    engine: EngineLink
    tokenizer: Tokenizer
    pid: int | None
    made: asyncio.Event = field(default_factory=asyncio.Event)
    users: int = 0
    timer: asyncio.TimerHandle | None = None

    @property
    def is_there(self) -> bool:
        return self.made.is_set() and self.pid is not None and self.engine.pid == self.pid


class Parking:
    """Nothing is parked longer than the settings' `park_s` after its last use, and never more than `park_gb`: the one
    that was used longest ago goes first."""

    def __init__(self, settings: Settings) -> None:
        self._park_s = settings.park_s
        capacity = int(settings.park_gb * 1e9) or psutil.virtual_memory().total // 2
        self.ledger = Ledger(capacity)
        # In the order of their last use.
        self._parked: dict[tuple[str, str], Parked] = {}
        self._leaving: set[asyncio.Task[None]] = set()

    def seconds(self, device: str) -> float:
        """How long a model of this device is kept. On a CPU it would come back no faster than from the page cache."""
        if self._park_s is None:
            return 0.0 if device == "cpu" else PARK_S
        return self._park_s

    async def borrow(self, name: str, engine: EngineLink) -> Parked | None:
        """The model that is parked under this name, to be loaded from there; waits while it is being made. Pair with
        `give_back`."""
        parked = self._parked.get((engine.device, name))
        if parked is None:
            return None
        self._use(parked)
        await parked.made.wait()
        if parked.is_there and self._is_known(parked):
            return parked
        self.discard(parked)
        return None

    def offer(self, name: str, engine: EngineLink, tokenizer: Tokenizer, size: int) -> Parked | None:
        """A place for a model of `size` bytes, others being let go for it; None when there is no room. The caller has
        it made and says so, or discards it, and gives it back in the end."""
        key = (engine.device, name)
        if not self.seconds(engine.device) or key in self._parked or size > self._reclaimable():
            return None
        while size > self.ledger.free:
            self._let_go(next(parked for parked in self._parked.values() if not parked.users))
        self.ledger.reserve(str(key), size)
        engine.hold()
        parked = self._parked[key] = Parked(name, engine, tokenizer, engine.pid)
        self._use(parked)
        return parked

    def take(self, model: str, size: int) -> None:
        """What a model uses of this memory while it is on a device, which it must have: idle ones go as far as they
        can. Pair with `give_up`."""
        idle = [parked for parked in self._parked.values() if not parked.users]
        while size > self.ledger.free and idle:
            self._let_go(idle.pop(0))
        self.ledger.take(f"beside {model}", size)

    def give_up(self, model: str) -> None:
        self.ledger.release(f"beside {model}")

    def give_back(self, parked: Parked) -> None:
        """The model is on the device no more, and may go when its time is over."""
        parked.users -= 1
        if self._is_known(parked) and not parked.users:
            loop = asyncio.get_running_loop()
            parked.timer = loop.call_later(self.seconds(parked.engine.device), self._let_go, parked)

    def discard(self, parked: Parked) -> None:
        """It isn't there after all."""
        parked.made.set()
        if self._is_known(parked):
            self._let_go(parked)

    async def close(self) -> None:
        """Everything goes, and nothing is parked any more."""
        self._park_s = 0.0
        for parked in [parked for parked in self._parked.values() if not parked.users]:
            self._let_go(parked)
        await asyncio.gather(*self._leaving)

    def _is_known(self, parked: Parked) -> bool:
        return self._parked.get((parked.engine.device, parked.name)) is parked

    def _use(self, parked: Parked) -> None:
        key = (parked.engine.device, parked.name)
        self._parked[key] = self._parked.pop(key, parked)
        parked.users += 1
        if parked.timer:
            parked.timer.cancel()

    def _reclaimable(self) -> int:
        """Bytes that are free or could be."""
        table = self.ledger.table()
        idle = (str(key) for key, parked in self._parked.items() if not parked.users)
        return self.ledger.free + sum(table[owner][0] for owner in idle)

    def _let_go(self, parked: Parked) -> None:
        key = (parked.engine.device, parked.name)
        del self._parked[key]
        self.ledger.release(str(key))
        if parked.timer:
            parked.timer.cancel()
        if parked.engine.pid == parked.pid:
            with contextlib.suppress(EngineDied):
                parked.engine.send({"t": "forget", "name": parked.name})
        task = asyncio.create_task(parked.engine.leave())
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)
