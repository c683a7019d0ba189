"""Random schedules on a tiny model: whatever happens around a request, its tokens are those of its lone run."""

import random
from typing import TYPE_CHECKING

import pytest

from tests.runtime.engine.random_schedules import CATALOGUE, LONGEST, Schedule, abort_at_every_step, random_options

if TYPE_CHECKING:
    from conftest import TinyModel


@pytest.fixture(scope="module")
def lone(tiny: "TinyModel") -> dict[str, list[int]]:
    engine = tiny.engine(max_model_len=LONGEST, prefix_cache=False)
    return {request.id: engine.generate([request])[request.id] for request in CATALOGUE}


@pytest.mark.parametrize("group", range(5))
def test_random_schedules_equal_lone_runs(tiny: "TinyModel", lone: dict[str, list[int]], group: int) -> None:
    preemptions = hits = 0
    for seed in range(group * 12, group * 12 + 12):
        rng = random.Random(seed)
        schedule = Schedule(tiny.engine(**random_options(rng)), lone, rng)
        schedule.run(aborts=0.05 if seed % 2 else 0.0)
        preemptions += schedule.engine.stats()["preemptions"]
        hits += schedule.engine.stats()["prefix_hit_tokens"]
    assert preemptions and hits, "the schedules are too tame to show anything"


def test_aborting_at_every_step_hurts_nobody_else(tiny: "TinyModel", lone: dict[str, list[int]]) -> None:
    abort_at_every_step(tiny.engine, lone)
