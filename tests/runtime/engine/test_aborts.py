"""Whoever is told to stop has stopped: not one more token is computed for it, whatever it was doing."""

from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.runtime.engine.request import GenerationRequest, SamplingParams

if TYPE_CHECKING:
    from conftest import TinyModel

LONGEST = 40
BUDGETS = st.sampled_from([8, 64])


def request(id: str, length: int, tokens: int = 24) -> GenerationRequest:
    prompt = [(7 * place + len(id)) % 90 for place in range(length)]
    return GenerationRequest(id, prompt, SamplingParams(max_tokens=tokens, ignore_eos=True))


def test_alone_the_engine_has_nothing_left_to_do(tiny: "TinyModel") -> None:
    """Before its first step, in the middle of its prompt, while it generates, just before its end, or after it."""
    moments, lengths = st.integers(0, LONGEST), st.integers(1, 60)

    @settings(max_examples=60, deadline=None)
    @given(moments, lengths, st.sampled_from(["off", "on"]), BUDGETS)
    def run(moment: int, length: int, scheduling: str, budget: int) -> None:
        stop_alone(tiny, moment, length, scheduling, budget)

    run()


def stop_alone(tiny: "TinyModel", moment: int, length: int, scheduling: str, budget: int) -> None:
    engine = tiny.engine(async_scheduling=scheduling, token_budget=budget, max_seqs=8, prefix_cache=False)
    engine.submit(request("gone", length))
    told = [item for _ in range(moment) if engine.has_work() for item in engine.step()]
    over = any(item.finish_reason for item in told)
    launched, computed = engine.stats()["steps"], engine.stats()["computed_tokens"]
    engine.abort("gone")
    calls = 0
    while engine.has_work():
        told += engine.step()
        calls += 1
    assert calls <= 1
    assert (engine.stats()["steps"], engine.stats()["computed_tokens"]) == (launched, computed)
    assert engine.stats()["used_blocks"] == 0
    assert [item.finish_reason for item in told if item.finish_reason] == ["length" if over else "abort"]
    produced = sum(len(item.tokens) for item in told)
    assert produced <= max(0, computed - length + 1) <= produced + (scheduling == "on")


@pytest.mark.parametrize("scheduling", ["off", "on"])
@pytest.mark.parametrize("moment", range(0, LONGEST, 3))
def test_beside_others_it_is_in_no_step_that_begins_later(tiny: "TinyModel", moment: int, scheduling: str) -> None:
    others = [request(f"other{number}", 10 + number) for number in range(3)]
    calm = tiny.engine().generate(others)
    engine = tiny.engine(async_scheduling=scheduling, token_budget=16, max_seqs=8)
    for each in (request("gone", 30, 60), *others):
        engine.submit(each)
    tokens: dict[str, list[int]] = {each.id: [] for each in others}
    for call in range(1000):
        if call == moment:
            engine.abort("gone")
        for item in engine.step():
            if item.request_id != "gone":
                tokens[item.request_id] += item.tokens
        assert call < moment or all(item.sequence.id != "gone" for item in engine.in_flight)
        if call >= moment and not engine.has_work():
            break
    assert tokens == calm
    assert engine.stats()["used_blocks"] == 0
