import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from stoker.runtime.engine.engine import Engine
from stoker.runtime.engine.request import Delta, GenerationRequest, SamplingParams
from stoker.runtime.engine.scheduler import Work

if TYPE_CHECKING:
    from conftest import TinyModel

POISON = 90
"""A token id whose embedding the tests make infinite or NaN."""


def request(name: str = "r", prompt: Iterable[int] = range(10, 30), **values: Any) -> GenerationRequest:
    outer = {key: values.pop(key) for key in ("prior", "cache_salt") if key in values}
    params = SamplingParams(**{"max_tokens": 8, "temperature": 0.0, "ignore_eos": True, **values})
    return GenerationRequest(name, list(prompt), params, **outer)


def finish(engine: Engine) -> dict[str, list[Delta]]:
    deltas: dict[str, list[Delta]] = {}
    while engine.has_work():
        for delta in engine.step():
            deltas.setdefault(delta.request_id, []).append(delta)
    return deltas


def tokens(deltas: list[Delta]) -> list[int]:
    return [token for delta in deltas for token in delta.tokens]


def assert_idle(engine: Engine) -> None:
    stats = engine.stats()
    assert not engine.has_work()
    assert (stats["running"], stats["waiting"], stats["used_blocks"]) == (0, 0, 0)
    assert stats["free_blocks"] + stats["cached_blocks"] == stats["total_blocks"]


def poisoned(tiny: "TinyModel", value: float) -> Engine:
    embedding = tiny.state["model.embed_tokens.weight"].clone()
    embedding[POISON] = value
    return replace(tiny, state={**tiny.state, "model.embed_tokens.weight": embedding}).engine()


def test_length_and_counts(tiny: "TinyModel") -> None:
    engine = tiny.engine()
    engine.submit(request(max_tokens=5))
    deltas = finish(engine)["r"]
    assert [delta.finish_reason for delta in deltas] == [None] * 4 + ["length"]
    assert [len(delta.tokens) for delta in deltas] == [1] * 5
    assert {(delta.prompt_tokens, delta.cached_tokens) for delta in deltas} == {(20, 0)}
    assert_idle(engine)


def test_the_end_token_stops_and_is_not_reported(tiny: "TinyModel") -> None:
    free = tiny.engine().generate([request()])["r"]
    ends = replace(tiny, config=replace(tiny.config, eos_token_ids=(96, free[3])))
    for stops, model in (((), ends), ((free[3],), tiny)):
        engine = model.engine()
        engine.submit(request(ignore_eos=False, stop_token_ids=stops))
        deltas = finish(engine)["r"]
        assert tokens(deltas) == free[: free.index(free[3])]
        assert (deltas[-1].finish_reason, deltas[-1].tokens) == ("stop", [])
        assert_idle(engine)
    assert ends.engine().generate([request()])["r"] == free, "ignore_eos goes on"


def test_submitting_what_can_never_run(tiny: "TinyModel") -> None:
    engine = tiny.engine()
    for bad in (request(prompt=[]), request(prompt=[97]), request(max_tokens=77)):
        with pytest.raises(ValueError):
            engine.submit(bad)
    engine.submit(request())
    with pytest.raises(ValueError, match="already here"):
        engine.submit(request())
    assert len(tokens(finish(engine)["r"])) == 8
    engine.submit(request())
    assert len(tokens(finish(engine)["r"])) == 8, "an id may be used again"


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.9, "seed": 7}, {"temperature": 1.3, "top_k": 9, "seed": 1}])
@pytest.mark.parametrize("cut", range(8))
def test_resumed_equals_whole(tiny: "TinyModel", sampling: dict[str, Any], cut: int) -> None:
    whole = tiny.engine().generate([request(**sampling)])["r"]
    resumed = tiny.engine().generate([request(**sampling, prior=whole[:cut])])["r"]
    assert whole[:cut] + resumed == whole


def test_nothing_is_left_to_do_when_prior_is_complete(tiny: "TinyModel") -> None:
    engine = tiny.engine()
    engine.submit(request(prior=[1] * 8))
    assert engine.step() == [Delta("r", [], "length", "", 20, 0)]
    assert_idle(engine)


def test_sampling_follows_seed_and_position_only(tiny: "TinyModel") -> None:
    sampled = request(temperature=1.0, seed=3)
    alone = tiny.engine().generate([sampled])["r"]
    others = [request(f"o{i}", range(i, i + 30), temperature=1.0, seed=i) for i in range(6)]
    assert tiny.engine().generate([*others, sampled])["r"] == alone
    assert tiny.engine(token_budget=64).generate([*others, sampled])["r"] == alone
    assert tiny.engine().generate([replace(sampled, params=replace(sampled.params, seed=4))])["r"] != alone


def test_chunked_equals_whole(tiny: "TinyModel") -> None:
    long = request(prompt=[i * 7 % 97 for i in range(80)])
    assert tiny.engine(token_budget=7, max_seqs=7).generate([long]) == tiny.engine().generate([long])


def test_a_prefix_hit_equals_a_miss_and_is_counted(tiny: "TinyModel") -> None:
    engine = tiny.engine()
    prompt = [i * 5 % 97 for i in range(50)]
    cold = engine.generate([request(prompt=prompt)])["r"]
    engine.submit(request(prompt=prompt))
    warm = finish(engine)["r"]
    assert (tokens(warm), warm[0].cached_tokens) == (cold, 48)
    engine.submit(request(prompt=prompt, cache_salt=b"somebody else"))
    salted = finish(engine)["r"]
    assert (tokens(salted), salted[0].cached_tokens) == (cold, 0)
    assert engine.stats()["prefix_hit_tokens"] == 48
    assert_idle(engine)


def test_colliding_hashes_never_mix_requests_up(tiny: "TinyModel", monkeypatch: pytest.MonkeyPatch) -> None:
    from stoker.runtime.engine import prefix

    requests = [request(f"{i}", [i % 3, *range(i, i + 40)], max_tokens=20) for i in range(12)]
    alone = {r.id: tiny.engine(prefix_cache=False).generate([r])[r.id] for r in requests}
    monkeypatch.setattr(prefix, "block_key", lambda parent, tokens: bytes([tokens[0] % 2]))
    engine = tiny.engine(num_blocks=12, max_seqs=3, max_model_len=96)
    for one in [*requests, *requests[::-1], *requests]:
        assert engine.generate([one])[one.id] == alone[one.id]
    assert engine.generate(requests) == alone
    assert engine.stats()["prefix_hit_tokens"] > 0
    assert_idle(engine)


def test_preempted_equals_undisturbed(tiny: "TinyModel") -> None:
    requests = [request(f"{i}", range(i, i + 20), max_tokens=40, temperature=i % 2, seed=i) for i in range(5)]
    calm = tiny.engine().generate(requests)
    for prefix_cache in (True, False):
        engine = tiny.engine(num_blocks=9, prefix_cache=prefix_cache)
        assert engine.generate(requests) == calm
        assert engine.stats()["preemptions"] > 0
        assert_idle(engine)


def test_abort_in_every_state(tiny: "TinyModel") -> None:
    engine = tiny.engine(max_seqs=2, token_budget=16)
    for name in ("prefilling", "running", "waiting", "kept"):
        engine.submit(request(name, range(30)))
    engine.step()
    for name in ("prefilling", "running", "waiting", "waiting", "unknown"):
        engine.abort(name)
    deltas = finish(engine)
    assert [delta.finish_reason for name in ("prefilling", "running", "waiting") for delta in deltas[name]] == [
        "abort"
    ] * 3
    assert tokens(deltas["kept"]) == tiny.engine().generate([request("kept", range(30))])["kept"]
    assert_idle(engine)


def test_an_aborted_id_may_come_back_at_once(tiny: "TinyModel") -> None:
    engine = tiny.engine()
    engine.submit(request())
    engine.step()
    engine.abort("r")
    engine.submit(request())
    deltas = finish(engine)["r"]
    assert (deltas[0].finish_reason, deltas[-1].finish_reason) == ("abort", "length")
    assert tokens(deltas) == tiny.engine().generate([request()])["r"]
    assert_idle(engine)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("where", [0, 5, 29, 59])
def test_non_finite_values_end_their_own_request_only(tiny: "TinyModel", value: float, where: int) -> None:
    engine = poisoned(tiny, value)
    prompt = [i % 80 for i in range(60)]
    bad = [*prompt[:where], POISON, *prompt[where + 1 :]]
    good = [request(f"{i}", range(i, i + 20), temperature=i % 2) for i in range(4)]
    calm = tiny.engine().generate(good)
    for one in (*good[:2], request("bad", bad), *good[2:]):
        engine.submit(one)
    deltas = finish(engine)
    assert [(d.tokens, d.finish_reason) for d in deltas["bad"]] == [([], "error")]
    assert "non-finite" in deltas["bad"][0].error
    assert {name: tokens(items) for name, items in deltas.items() if name != "bad"} == calm
    assert_idle(engine)


def test_nothing_non_finite_is_cached_or_left_for_the_next_owner(tiny: "TinyModel") -> None:
    engine = poisoned(tiny, math.nan)
    engine.runner.kv.fill_(math.nan)
    bad = request("bad", [*range(20), POISON, *range(20)])
    for _ in range(2):
        engine.submit(bad)
        (delta,) = finish(engine)["bad"]
        assert (delta.finish_reason, delta.cached_tokens) == ("error", 0)
    assert engine.stats()["cached_blocks"] == 0
    many = [request(f"{i}", range(i, i + 23), max_tokens=40) for i in range(12)]
    calm = {name: found for name, found in tiny.engine().generate(many).items() if POISON not in found}
    assert len(calm) >= 6
    assert engine.generate([one for one in many if one.id in calm]) == calm


def test_a_finite_beginning_stays_cached_when_a_later_chunk_is_not(tiny: "TinyModel") -> None:
    engine = poisoned(tiny, math.nan)
    engine.scheduler.limit_step(16, 16)
    engine.submit(request("bad", [*range(40), POISON]))
    assert finish(engine)["bad"][0].finish_reason == "error"
    assert engine.stats()["cached_blocks"] == 2
    assert engine.generate([request("good", range(40))]) == tiny.engine().generate([request("good", range(40))])
    assert engine.stats()["prefix_hit_tokens"] == 32


Launch = Callable[[list[Work]], Any]


def failing(engine: Engine, monkeypatch: pytest.MonkeyPatch, culprits: set[str], error: Exception) -> None:
    launch: Launch = engine.runner.launch

    def fail(work: list[Work]) -> Any:
        if culprits & {item.sequence.id for item in work}:
            raise error
        return launch(work)

    monkeypatch.setattr(engine.runner, "launch", fail)


def test_an_exception_fails_only_those_to_blame(tiny: "TinyModel", monkeypatch: pytest.MonkeyPatch) -> None:
    engine = tiny.engine()
    requests = [request(f"{i}", range(i, i + 20), temperature=i % 2) for i in range(5)]
    failing(engine, monkeypatch, {"1", "3"}, RuntimeError("too much"))
    for one in requests:
        engine.submit(one)
    deltas = finish(engine)
    calm = tiny.engine().generate(requests)
    for name in "024":
        assert tokens(deltas[name]) == calm[name]
    for name in "13":
        assert deltas[name] == [Delta(name, [], "error", "RuntimeError: too much", 20, 0)]
    assert_idle(engine)


def test_a_broken_device_is_not_survived(tiny: "TinyModel", monkeypatch: pytest.MonkeyPatch) -> None:
    engine = tiny.engine()
    failing(engine, monkeypatch, {"r"}, torch.AcceleratorError("illegal memory access"))
    engine.submit(request())
    with pytest.raises(torch.AcceleratorError):
        engine.step()


def test_fail_all_ends_everything_with_the_reason(tiny: "TinyModel") -> None:
    engine = tiny.engine(max_seqs=1)
    engine.submit(request("a"))
    engine.submit(request("b"))
    engine.step()
    assert [(d.request_id, d.finish_reason, d.error) for d in engine.fail_all("gone")] == [
        ("a", "error", "gone"),
        ("b", "error", "gone"),
    ]
    assert_idle(engine)


def test_generate_raises_for_a_failed_request(tiny: "TinyModel") -> None:
    with pytest.raises(RuntimeError, match="request r: .*non-finite"):
        poisoned(tiny, math.nan).generate([request(prompt=[POISON])])


def test_bfloat16_is_close_to_float32(tiny: "TinyModel") -> None:
    """Rounding may change a token where two are nearly as likely, so only the first ones are compared."""
    many = [request(f"{i}", range(i, i + 10), max_tokens=1) for i in range(40)]
    exact, rounded = tiny.engine().generate(many), tiny.engine(dtype="bfloat16").generate(many)
    assert sum(exact[name] == rounded[name] for name in exact) >= 36
