"""500 random schedules with a device that keeps tokens where a real one keeps keys and values.

Each sampled token is a hash of everything that its sequence reads through the device's block table, so that one wrong
block, position, row or parameter anywhere changes it: the bookkeeping of the engine, checked without its arithmetic.
"""

import random
from collections.abc import Sequence as Seq
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from stoker.coldstart.arrival import Arrival
from stoker.runtime.engine import engine as engine_module
from stoker.runtime.engine.blocks import NULL_BLOCK
from stoker.runtime.engine.engine import Engine
from stoker.runtime.engine.request import SamplingParams
from stoker.runtime.engine.scheduler import Outcome, Work
from tests.runtime.engine.random_schedules import CATALOGUE, LONGEST, Schedule, abort_at_every_step, random_options

if TYPE_CHECKING:
    from conftest import TinyModel

VOCAB = 97
SCHEDULES, GROUPS = 500, 10


class Launched:
    computed = None

    def __init__(self, work: Seq[Work], tokens: list[int]) -> None:
        self.work = work
        self.tokens = tokens

    def outcomes(self) -> list[Outcome]:
        return [Outcome(token) for token in self.tokens]


class Device:
    """Stands in for a Runner: a table of rows (blocks, parameters, last sampled token), and cells that hold a position
    and its token."""

    grammars = None
    may_capture = False
    graphs: Any

    def __init__(self, *_: Any) -> None:
        self.blocks: dict[int, list[int]] = {}
        self.params: dict[int, SamplingParams] = {}
        self.last_token: dict[int, int] = {}
        self.cells: dict[tuple[int, int], tuple[int, int]] = {}
        self.graphs = NoGraphs()
        self.kv = self
        self.weights = SimpleNamespace(arena=SimpleNamespace(nbytes=1), arrival=Arrival(0))

    def launch(self, work: Seq[Work]) -> Launched:
        for item in work:
            self.receive(item)
        # A layer writes all keys before any of them is read.
        for item in work:
            self.write(item)
        tokens = [self.sampled(item) for item in work]
        for item, token in zip(work, tokens, strict=True):
            self.last_token[item.sequence.row] = token
        return Launched(work, tokens)

    def finish(self, launched: Launched) -> None:
        pass

    def run(self, work: Seq[Work]) -> list[Outcome]:
        return self.launch(work).outcomes()

    def late_kernels(self) -> int:
        return 0

    def receive(self, item: Work) -> None:
        """What a step's upload changes in the table, and no more."""
        sequence = item.sequence
        if sequence.sent_blocks < 0:
            self.blocks[sequence.row], self.params[sequence.row] = [], sequence.params
        known = self.blocks[sequence.row][: max(0, sequence.sent_blocks)]
        self.blocks[sequence.row] = known + list(sequence.blocks[len(known) :])
        sequence.sent_blocks = len(sequence.blocks)

    def write(self, item: Work) -> None:
        sequence = item.sequence
        for position in range(item.start, item.start + item.count):
            known = position < len(sequence.tokens)
            token = sequence.tokens[position] if known else self.last_token[sequence.row]
            self.cells[self.place(sequence.row, position)] = (position, token)

    def sampled(self, item: Work) -> int:
        row, end = item.sequence.row, item.start + item.count
        cells = [self.cells[self.place(row, position)] for position in range(end)]
        assert all(cell[0] == position for position, cell in enumerate(cells)), "a block of another position was read"
        params = self.params[row]
        seed = params.seed if params.temperature else 0
        return hash((seed, end, params.top_k, *(token for _, token in cells))) % VOCAB

    def place(self, row: int, position: int) -> tuple[int, int]:
        block = self.blocks[row][position // 16]
        assert block != NULL_BLOCK
        return block, position % 16


class Copies:
    """Of cells, to host memory and back."""

    def __init__(self, device: Device, slots: int) -> None:
        self.device = device
        self.host: list[dict[int, tuple[int, int]]] = [{} for _ in range(slots)]
        self.done: list[int] = []

    def save(self, moves: Seq[tuple[int, int]]) -> None:
        for block, slot in moves:
            self.host[slot] = {offset: self.device.cells[block, offset] for offset in range(16)}
            self.done.append(block)

    def restore(self, moves: Seq[tuple[int, int]]) -> None:
        for slot, block in moves:
            self.device.cells |= {(block, offset): cell for offset, cell in self.host[slot].items()}

    def saved(self, wait: bool = False) -> list[int]:
        done, self.done = self.done, []
        return done


class NoGraphs:
    bytes = replays = 0

    def __len__(self) -> int:
        return 0


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "Runner", Device)
    monkeypatch.setattr(engine_module, "Copies", Copies)


def lone_runs(tiny: "TinyModel") -> dict[str, list[int]]:
    """Each with an engine of its own, one step at a time."""

    def alone(number: int) -> list[int]:
        engine = tiny.engine(max_model_len=LONGEST, prefix_cache=False, async_scheduling="off")
        return engine.generate([CATALOGUE[number]])[CATALOGUE[number].id]

    return {request.id: alone(number) for number, request in enumerate(CATALOGUE)}


@pytest.mark.parametrize("group", range(GROUPS))
def test_random_schedules_read_what_lone_runs_read(tiny: "TinyModel", group: int) -> None:
    lone = lone_runs(tiny)
    preempted = hit = aborted = returned = 0
    for seed in range(group, SCHEDULES, GROUPS):
        rng = random.Random(seed)
        schedule = Schedule(tiny.engine(**random_options(rng)), lone, rng)
        schedule.run(aborts=rng.choice([0.0, 0.02, 0.1, 0.5]))
        preempted += schedule.engine.stats()["preemptions"] > 0
        hit += schedule.engine.stats()["prefix_hit_tokens"] > 0
        returned += schedule.engine.stats()["host_hit_tokens"] > 0
        aborted += len(schedule.aborted) > 0
    assert min(preempted, hit, aborted) > SCHEDULES / GROUPS / 5 and returned > 2, (
        "the schedules are too tame to show anything"
    )


def test_aborting_at_every_step_changes_nothing_that_others_read(tiny: "TinyModel") -> None:
    abort_at_every_step(tiny.engine, lone_runs(tiny))


def hit_everything(engine: Engine) -> None:
    """A cache that finds the wrong block: what a broken hash would do."""
    find = engine.pool.find
    engine.pool.find = lambda key, tokens, parent: (
        find(key, tokens, parent)
        or next(  # type: ignore[method-assign]
            iter(engine.pool.entries.values()), None
        )
    )


def test_the_device_notices_a_wrong_block(tiny: "TinyModel") -> None:
    lone = lone_runs(tiny)
    rng = random.Random(1)
    options = {**random_options(rng), "prefix_cache": True, "num_blocks": 9, "max_seqs": 4, "token_budget": 40}
    engine = tiny.engine(**options)
    hit_everything(engine)
    with pytest.raises(AssertionError):
        for _ in range(5):
            Schedule(engine, lone, rng).run(aborts=0.0)
