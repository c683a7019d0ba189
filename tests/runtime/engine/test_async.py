"""Steps planned one ahead, on the CPU: the same bookkeeping as on a GPU, compared with the synchronous engine."""

import math
import random
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from stoker.coldstart.arrival import Arrival
from stoker.runtime.engine.engine import Engine
from stoker.runtime.engine.request import Delta, GenerationRequest, SamplingParams

if TYPE_CHECKING:
    from conftest import TinyModel

POISON = 90


def request(name: str = "r", prompt: Any = range(10, 30), **values: Any) -> GenerationRequest:
    params = SamplingParams(**{"max_tokens": 8, "temperature": 0.0, "ignore_eos": True, **values})
    return GenerationRequest(name, list(prompt), params)


def ahead(tiny: "TinyModel", **options: Any) -> Engine:
    return tiny.engine(async_scheduling="on", **options)


def stopping_at(token: int, **values: Any) -> GenerationRequest:
    return request(stop_token_ids=(token,), max_tokens=30, **values)


def unique_token(tokens: list[int], earliest: int) -> int:
    """The index of a token, not the first `earliest`, that occurs nowhere before."""
    return next(i for i in range(earliest, len(tokens)) if tokens[i] not in tokens[:i])


def finish(engine: Engine) -> list[Delta]:
    deltas: list[Delta] = []
    while engine.has_work():
        deltas += engine.step()
    assert engine.stats()["used_blocks"] == 0
    return deltas


def test_a_step_is_launched_before_the_tokens_of_the_last_are_known(tiny: "TinyModel") -> None:
    engine = ahead(tiny)
    engine.submit(request())
    assert engine.step() == []
    (sequence,) = engine.scheduler.running
    assert (len(sequence.tokens), sequence.pending, sequence.computed) == (20, 1, 20)
    assert [delta.tokens for delta in engine.step()] == [[sequence.tokens[20]]]
    assert (len(sequence.tokens), sequence.pending, sequence.computed) == (21, 1, 21)


def test_no_step_is_launched_ahead_while_weights_are_on_their_way(tiny: "TinyModel") -> None:
    engine, wanted = ahead(tiny), tiny.engine().generate([request()])["r"]
    arrival = Arrival(engine.config.num_layers + 2)
    engine.resume(replace(engine.runner.weights, arrival=arrival))
    for stage in range(arrival.stages):
        arrival.issued(stage, None)
    engine.submit(request())
    assert [delta.tokens for delta in engine.step()] == [wanted[:1]]
    arrival.finish()
    assert engine.step() == []
    assert [token for delta in finish(engine) for token in delta.tokens] == wanted[1:]


def test_the_last_token_by_length_starts_no_further_step(tiny: "TinyModel") -> None:
    engine = ahead(tiny)
    engine.submit(request(max_tokens=5))
    assert len([delta for delta in finish(engine) if delta.tokens]) == 5
    assert engine.stats()["steps"] == 5


def test_what_runs_past_the_end_token_is_dropped_and_keeps_its_blocks_until_it_ends(tiny: "TinyModel") -> None:
    free = tiny.engine().generate([request(max_tokens=30)])["r"]
    index = unique_token(free, 3)
    engine = ahead(tiny, prefix_cache=False)
    engine.submit(stopping_at(free[index]))
    deltas: list[Delta] = []
    while not deltas or deltas[-1].finish_reason is None:
        deltas += engine.step()
    assert [token for delta in deltas for token in delta.tokens] == free[:index]
    assert (deltas[-1].finish_reason, engine.scheduler.running) == ("stop", [])
    assert engine.stats()["used_blocks"] > 0, "the step in flight may still write them"
    assert finish(engine) == []


def test_a_row_whose_owner_ended_serves_the_next(tiny: "TinyModel") -> None:
    free = tiny.engine().generate([request(max_tokens=30)])["r"]
    index = unique_token(free, 2)
    engine = ahead(tiny, max_seqs=1)
    for i in range(6):
        ends = replace(stopping_at(free[index]), id=f"s{i}")
        assert engine.generate([ends, request(f"r{i}")]) == {f"s{i}": free[:index], f"r{i}": free[:8]}


def test_an_abort_wins_over_the_tokens_in_flight(tiny: "TinyModel") -> None:
    engine = ahead(tiny, prefix_cache=False)
    engine.submit(request(max_tokens=1))
    engine.step()
    engine.abort("r")
    assert engine.stats()["used_blocks"] > 0
    engine.submit(request(max_tokens=2))
    deltas = finish(engine)
    assert [(d.tokens, d.finish_reason) for d in deltas][0] == ([], "abort")
    assert [t for d in deltas for t in d.tokens] == tiny.engine().generate([request(max_tokens=2)])["r"]


def test_nothing_is_cached_before_its_step_is_known_to_be_finite(tiny: "TinyModel") -> None:
    embedding = tiny.state["model.embed_tokens.weight"].clone()
    embedding[POISON] = math.nan
    engine = ahead(replace(tiny, state={**tiny.state, "model.embed_tokens.weight": embedding}), token_budget=64)
    engine.submit(request("bad", [*range(40), POISON, *range(40)]))
    engine.step()
    engine.submit(request("twin", [*range(40), POISON, *range(40)]))
    engine.submit(request("good"))
    deltas = finish(engine)
    ends = {delta.request_id: delta.finish_reason for delta in deltas if delta.finish_reason}
    assert ends == {"bad": "error", "twin": "error", "good": "length"}
    assert all(delta.cached_tokens == 0 for delta in deltas)
    good = [t for d in deltas if d.request_id == "good" for t in d.tokens]
    assert good == tiny.engine().generate([request("good")])["good"]


def test_preemption_waits_for_the_step_in_flight(tiny: "TinyModel") -> None:
    requests = [request(f"{i}", range(i, i + 20), max_tokens=40, temperature=i % 2, seed=i) for i in range(5)]
    engine = ahead(tiny, num_blocks=9)
    for one in requests:
        engine.submit(one)
    got: dict[str, list[int]] = {one.id: [] for one in requests}
    while engine.has_work():
        before, waiting = engine.stats()["preemptions"], bool(engine.in_flight)
        for delta in engine.step():
            got[delta.request_id] += delta.tokens
        assert engine.stats()["preemptions"] == before or not waiting
    assert engine.stats()["preemptions"] > 0
    assert got == tiny.engine().generate(requests)


def test_a_failing_launch_fails_only_those_to_blame(tiny: "TinyModel", monkeypatch: pytest.MonkeyPatch) -> None:
    requests = [request(f"{i}", range(i, i + 20), temperature=i % 2) for i in range(4)]
    calm = tiny.engine().generate(requests)
    engine = ahead(tiny)
    launch, launches = engine.runner.launch, 0

    def fail(work: Any) -> Any:
        nonlocal launches
        launches += 1
        if launches > 3 and any(item.sequence.id == "2" for item in work):
            raise RuntimeError("too much")
        return launch(work)

    monkeypatch.setattr(engine.runner, "launch", fail)
    for one in requests:
        engine.submit(one)
    deltas = finish(engine)
    for name in "013":
        assert [t for d in deltas if d.request_id == name for t in d.tokens] == calm[name]
    bad = [d for d in deltas if d.request_id == "2"]
    assert [t for d in bad for t in d.tokens] == calm["2"][:3]
    assert (bad[-1].finish_reason, bad[-1].error) == ("error", "RuntimeError: too much")


def test_fail_all_with_a_step_in_flight_frees_everything(tiny: "TinyModel") -> None:
    engine = ahead(tiny)
    engine.submit(request())
    engine.step()
    assert [(d.finish_reason, d.error) for d in engine.fail_all("gone")] == [("error", "gone")]
    assert not engine.has_work()
    assert engine.stats()["used_blocks"] == 0
    assert engine.generate([request()]) == tiny.engine().generate([request()])


def run(engine: Engine, requests: list[GenerationRequest], seed: int) -> dict[str, tuple[list[int], str]]:
    """Requests arrive at random steps."""
    rng, coming = random.Random(seed), list(requests)
    got: dict[str, list[int]] = {one.id: [] for one in requests}
    ends: dict[str, str] = {}
    while coming or engine.has_work():
        while coming and rng.random() < 0.5:
            engine.submit(coming.pop())
        for delta in engine.step():
            assert delta.request_id not in ends
            got[delta.request_id] += delta.tokens
            if delta.finish_reason:
                ends[delta.request_id] = delta.finish_reason
    assert engine.stats()["used_blocks"] == 0
    return {name: (tokens, ends[name]) for name, tokens in got.items()}


@pytest.mark.parametrize("seed", range(12))
def test_asynchronous_equals_synchronous(tiny: "TinyModel", seed: int) -> None:
    rng = random.Random(seed)
    beginning = [rng.randrange(97) for _ in range(20)]
    requests = [
        GenerationRequest(
            str(i),
            (beginning if rng.random() < 0.5 else []) + [rng.randrange(97) for _ in range(rng.randint(1, 30))],
            SamplingParams(
                rng.randint(1, 20),
                temperature=rng.choice([0.0, 0.9]),
                top_k=rng.choice([0, 12]),
                seed=i,
                stop_token_ids=tuple(rng.sample(range(97), rng.choice([0, 6]))),
            ),
        )
        for i in range(10)
    ]
    options: dict[str, Any] = {"num_blocks": rng.randint(6, 14), "max_seqs": rng.randint(1, 5), "token_budget": 24}
    synchronous = run(tiny.engine(async_scheduling="off", **options), requests, seed)
    assert run(ahead(tiny, **options), requests, seed) == synchronous
