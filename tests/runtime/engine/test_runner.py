from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from stoker.coldstart.arrival import Arrival
from stoker.runtime.engine.options import EngineOptions
from stoker.runtime.engine.request import GenerationRequest, SamplingParams
from stoker.runtime.engine.runner import NON_FINITE, outcome, samples_of, warm_up_shapes
from stoker.runtime.engine.scheduler import Outcome

if TYPE_CHECKING:
    from conftest import TinyModel


@pytest.mark.parametrize(
    "values",
    [
        {"max_seqs": 4, "token_budget": 4, "max_model_len": 2},
        {"max_seqs": 1, "max_model_len": 33},
        {"max_seqs": 64, "token_budget": 8192},
    ],
)
def test_warm_up_steps_are_steps_that_can_happen(tiny: "TinyModel", values: dict[str, Any]) -> None:
    options = EngineOptions(**values).resolve(tiny.config)
    shapes = warm_up_shapes(options)
    for shape in shapes:
        assert 1 <= shape.sequences <= options.max_seqs
        assert shape.tokens >= 1 and shape.sequences * shape.tokens <= options.token_budget
        assert shape.start + shape.tokens <= options.max_model_len
    assert {shape.sequences for shape in shapes if shape.tokens == 1} >= {1, options.max_seqs}


def test_dummy_work_leaves_no_trace(tiny: "TinyModel") -> None:
    engine = tiny.engine()
    dummy = engine.runner.dummy_work
    outcomes = engine.runner.run([dummy(0, 20), dummy(19, 1), dummy(40, 30)])
    assert not any(outcome.error for outcome in outcomes)
    assert not engine.runner.kv[1:].any()
    assert engine.pool.free == engine.pool.total


def test_running_the_same_work_again_changes_nothing(tiny: "TinyModel") -> None:
    engine = tiny.engine(token_budget=16, max_seqs=4)
    for i in range(3):
        engine.submit(GenerationRequest(str(i), range(i, i + 9), SamplingParams(5, seed=i)))
    for _ in range(3):
        work = engine.scheduler.schedule()
        first, kv = engine.runner.run(work), engine.runner.kv.clone()
        assert engine.runner.run(work) == first
        assert engine.runner.kv.equal(kv)
        engine.scheduler.commit(work, first)


@pytest.mark.parametrize(("windows", "layers"), [((0, 0, 0, 0), 2), ((0, 8, 8, 8), 3), ((8, 8, 8, 0), 4), ((0,), 1)])
def test_a_warm_up_takes_the_layers_that_show_every_kind_of_attention_and_waits_for_no_weights(
    tiny: "TinyModel", windows: tuple[int, ...], layers: int
) -> None:
    weights = tiny.engine().runner.weights
    whole = replace(weights, layers=[weights.layers[0]] * len(windows), arrival=Arrival(5))
    chosen = samples_of(whole, windows)
    assert len(chosen.layers) == layers
    assert chosen.arrival.done and not whole.arrival.done


def test_a_negative_token_is_an_error() -> None:
    assert [outcome(token) for token in (7, 0, -1)] == [Outcome(7), Outcome(0), Outcome(-1, NON_FINITE)]
