"""The adapters of one model on its device: a fixed number of slots, filled on demand while steps go on.

Who asks for an adapter waits here until it has a slot, and is let go to the scheduler then. A slot belongs to its
adapter as long as a request uses it; of the others the one that was used longest ago gives way. A thread reads and
checks files; no step waits for their copies to the device, and none sees half an adapter. What a slot holds stays in
host memory too: when the model leaves the device and comes back, it is copied again.
"""

from collections.abc import Sequence as Seq
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field

import torch

from stoker.runtime.adapters.adapted import Adapted
from stoker.runtime.adapters.adapter_file import AdapterFile, fill
from stoker.runtime.adapters.peft import NOT_LOADED
from stoker.runtime.adapters.slot_memory import padded_rank, sizes_of, slot_numbers, slots_bytes, views
from stoker.runtime.engine.batch import ADAPTER_WORD
from stoker.runtime.engine.config import ModelConfig
from stoker.runtime.engine.options import EngineOptions
from stoker.runtime.engine.sequence import Sequence
from stoker.runtime.engine.state import Batch, Table

MAX_OVERTAKES = 8
"""By so many others who found a slot one that finds none is passed; then all wait for it."""
PAUSE_S = 0.002


@dataclass(eq=False, slots=True)
class Slot:
    """`number` counts from 1. `loading` until its adapter is in `host` memory, `copied` from there once that event has
    happened; `users` need it."""

    number: int
    revision: str = ""
    loading: Future[None] | None = None
    users: list[Sequence] = field(default_factory=list)
    used_at: int = 0
    host: torch.Tensor | None = None
    copied: torch.cuda.Event | None = None

    @property
    def is_ready(self) -> bool:
        return bool(self.revision) and self.loading is None and (self.copied is None or self.copied.query())

    @property
    def is_unused(self) -> bool:
        self.users = [user for user in self.users if not user.ended]
        return not self.users and (self.is_ready or not self.revision)


@dataclass(eq=False, slots=True)
class Waiter:
    sequence: Sequence
    file: AdapterFile
    overtaken: int = 0


class Adapters:
    """Not thread-safe. `options` are resolved; without `memory` of `slots_bytes`, allocates it."""

    def __init__(self, config: ModelConfig, options: EngineOptions, memory: torch.Tensor | None = None) -> None:
        self._sizes, self._rank, self._dtype = sizes_of(config), padded_rank(options), options.torch_dtype
        self._most = options.adapter_rank
        self._slots = [Slot(number) for number in range(1, options.adapter_slots + 1)]
        self._stream = torch.cuda.Stream() if options.device == "cuda" else None
        self._waiting: dict[Sequence, Waiter] = {}
        # One thread: reading never takes more than a core from the steps.
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="adapters")
        self._clock = 0
        self.loads = 0
        size = slots_bytes(config, options)
        self._bind(torch.empty(size, dtype=torch.uint8, device=options.device) if memory is None else memory)

    def _bind(self, memory: torch.Tensor) -> None:
        numbers = slot_numbers(self._sizes, self._rank)
        self._memory = memory.view(self._dtype).view(len(self._slots), numbers)
        self._views = views(self._memory, self._sizes, self._rank)

    def rebind(self, memory: torch.Tensor) -> None:
        """Other memory from now on, or the same after others had it: what the slots hold is copied there."""
        self._bind(memory)
        for slot in self._slots:
            if slot.revision and not slot.loading:
                self._copy(slot)
        if self._stream:
            torch.cuda.current_stream().wait_stream(self._stream)

    @property
    def host_bytes(self) -> int:
        """When all slots have been used."""
        return self._memory.nbytes

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def ask(self, sequence: Sequence, file: AdapterFile) -> None:
        """`admit` will let go of the sequence."""
        self._waiting[sequence] = Waiter(sequence, file)

    def awaits(self, sequence: Sequence) -> bool:
        return sequence in self._waiting

    def withdraw(self, sequence: Sequence) -> None:
        """Whether or not it waits here."""
        self._waiting.pop(sequence, None)

    def advance(self, idle: bool) -> list[tuple[Sequence, str]]:
        """Puts what was read into its slot; sequences whose adapter can't be had, each with the reason. With nothing
        else to do, waits a moment."""
        loading = [slot.loading for slot in self._slots if slot.loading]
        wait(loading, PAUSE_S if idle else 0, FIRST_COMPLETED)
        failed: list[tuple[Sequence, str]] = []
        for slot in self._slots:
            if slot.loading and slot.loading.done():
                failed += self._arrived(slot, slot.loading)
        return failed

    def admit(self) -> list[Sequence]:
        """Those that have their adapter now. Begins to read what others wait for, the patient ones last."""
        admitted: list[Sequence] = []
        blocked: list[Waiter] = []
        for waiter in sorted(self._waiting.values(), key=lambda each: each.sequence.patient):
            if any(each.overtaken >= MAX_OVERTAKES for each in blocked):
                break
            slot = self._slot_for(waiter.file)
            if slot is None:
                blocked.append(waiter)
            elif slot.is_ready:
                self._take(slot, waiter)
                admitted.append(waiter.sequence)
                for each in blocked:
                    each.overtaken += 1
        return admitted

    def adapted(self, batch: Batch, table: Table) -> Adapted:
        """For the products of one step. Reads nothing on the host: it can be part of a graph."""
        return Adapted(self._views, batch, table.params.index_select(0, batch.rows)[:, ADAPTER_WORD].contiguous())

    def stats(self) -> dict[str, int]:
        return {"adapters": len(self.resident()), "adapters_waiting": self.waiting, "adapter_loads": self.loads}

    def resident(self) -> Seq[str]:
        """Revisions."""
        return [slot.revision for slot in self._slots if slot.is_ready]

    def _take(self, slot: Slot, waiter: Waiter) -> None:
        del self._waiting[waiter.sequence]
        waiter.sequence.adapter = slot.number
        slot.users.append(waiter.sequence)
        self._clock += 1
        slot.used_at = self._clock

    def _slot_for(self, file: AdapterFile) -> Slot | None:
        """The one with this adapter, which may be on its way into it; None when all others are in use."""
        for slot in self._slots:
            if slot.revision == file.revision:
                return slot
        slot = min((slot for slot in self._slots if slot.is_unused), key=lambda each: each.used_at, default=None)
        if slot:
            slot.revision = file.revision
            slot.loading = self._reader.submit(self._read, slot, file)
        return slot

    def _read(self, slot: Slot, file: AdapterFile) -> None:
        if slot.host is None:
            numbers = slot_numbers(self._sizes, self._rank)
            slot.host = torch.empty(numbers, dtype=self._dtype, pin_memory=self._stream is not None)
        if slot.copied:
            slot.copied.synchronize()
        fill(slot.host, file, self._sizes, self._rank, self._most)

    def _arrived(self, slot: Slot, loading: Future[None]) -> list[tuple[Sequence, str]]:
        """Those who hoped for it in vain."""
        slot.loading = None
        if error := loading.exception():
            revision, slot.revision = slot.revision, ""
            lost = [waiter.sequence for waiter in self._waiting.values() if waiter.file.revision == revision]
            return [(sequence, f"{NOT_LOADED}: {error}") for sequence in lost]
        self.loads += 1
        self._copy(slot)
        return []

    def _copy(self, slot: Slot) -> None:
        """After the steps under way, which may read what was there."""
        target, source = self._memory[slot.number - 1], slot.host
        assert source is not None
        if self._stream is None:
            target.copy_(source)
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            slot.copied = torch.cuda.Event()
            slot.copied.record()
