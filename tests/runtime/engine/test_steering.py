"""Penalties, biases and log-probabilities against a plain loop over transformers' logits: alone, in company, planned
ahead, preempted and resumed."""

import math
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from stoker.runtime.engine.engine import Engine
from stoker.runtime.engine.request import Delta, GenerationRequest, SamplingParams

if TYPE_CHECKING:
    from conftest import TinyModel

PROMPT = [*range(10, 30), 12, 13]
CASES: dict[str, dict[str, Any]] = {
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 0.9},
    "negative": {"presence_penalty": -1.0, "frequency_penalty": -0.5},
    "repetition": {"repetition_penalty": 1.4},
    "all": {"presence_penalty": 0.4, "frequency_penalty": 0.7, "repetition_penalty": 1.2, "logit_bias": ((40, 3.0),)},
    "bias": {"logit_bias": ((7, 100.0), (8, -100.0))},
    "ban": {"logit_bias": tuple((token, -100.0) for token in range(0, 97, 2))},
    "logprobs": {"logprobs": 3},
    "logprobs of the sampled token alone": {"logprobs": 0, "frequency_penalty": 0.3},
}


@pytest.fixture(scope="module")
def theirs(tiny: "TinyModel") -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig(**tiny.hf_config)).eval()
    model.load_state_dict(tiny.state)
    return model


def request(name: str, prompt: list[int] = PROMPT, prior: list[int] | None = None, **values: Any) -> GenerationRequest:
    params = SamplingParams(**{"max_tokens": 24, "temperature": 0.0, "ignore_eos": True, **values})
    return GenerationRequest(name, prompt, params, prior or [])


@torch.inference_mode()
def oracle(theirs: Any, asked: GenerationRequest) -> tuple[list[int], list[torch.Tensor]]:
    """Greedy tokens, and the raw log-probabilities each was chosen from, by what the parameters are defined to mean."""
    params, answer, seen = asked.params, list(asked.prior), []
    for _ in range(params.max_tokens - len(asked.prior)):
        raw = theirs(torch.tensor([[*asked.prompt, *answer]])).logits[0, -1].double()
        seen.append(raw.log_softmax(-1))
        scores = raw.clone()
        for token in {*asked.prompt, *answer}:
            scores[token] *= params.repetition_penalty if scores[token] < 0 else 1 / params.repetition_penalty
        for token, count in Counter(answer).items():
            scores[token] -= count * params.frequency_penalty + params.presence_penalty
        for token, bias in params.logit_bias:
            scores[token] += bias
        answer.append(int(scores.argmax()))
    return answer[len(asked.prior) :], seen


def run(engine: Engine, requests: list[GenerationRequest]) -> dict[str, list[Delta]]:
    answers: dict[str, list[Delta]] = {each.id: [] for each in requests}
    for each in requests:
        engine.submit(each)
    while engine.has_work():
        for item in engine.step():
            assert item.finish_reason != "error", item.error
            answers[item.request_id].append(item)
    assert engine.stats()["used_blocks"] == 0
    return answers


def tokens(deltas: list[Delta]) -> list[int]:
    return [token for item in deltas for token in item.tokens]


@pytest.mark.parametrize("case", CASES)
def test_tokens_are_those_of_the_definition(tiny: "TinyModel", theirs: Any, case: str) -> None:
    asked = request("r", **CASES[case])
    assert tokens(run(tiny.engine(), [asked])["r"]) == oracle(theirs, asked)[0]


COMPANY = [request(name, PROMPT[i:], **values) for i, (name, values) in enumerate(CASES.items())]
PLAIN = [request(f"plain {i}", [30 + i, 31], temperature=1.0, top_k=20, seed=i) for i in range(3)]


@pytest.fixture(scope="module")
def alone(tiny: "TinyModel") -> dict[str, list[int]]:
    return {each.id: tokens(run(tiny.engine(), [each])[each.id]) for each in [*COMPANY, *PLAIN]}


@pytest.mark.parametrize(
    "options",
    [{}, {"async_scheduling": "on"}, {"num_blocks": 12, "async_scheduling": "on"}, {"max_seqs": 3, "token_budget": 9}],
    ids=["together", "ahead", "preempted", "chunked"],
)
def test_neighbours_and_schedules_change_nothing(
    tiny: "TinyModel", alone: dict[str, list[int]], options: dict[str, Any]
) -> None:
    engine = tiny.engine(**options)
    together = run(engine, [*COMPANY, *PLAIN])
    assert {name: tokens(deltas) for name, deltas in together.items()} == alone
    assert bool(engine.stats()["preemptions"]) == ("num_blocks" in options)


@pytest.mark.parametrize("case", ["all", "repetition"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_resumed_request_goes_on_as_if_it_had_never_stopped(tiny: "TinyModel", case: str, temperature: float) -> None:
    asked = request("r", temperature=temperature, seed=5, **CASES[case])
    whole = tokens(run(tiny.engine(), [asked])["r"])
    resumed = replace(asked, prior=whole[:9])
    assert whole[:9] + tokens(run(tiny.engine(async_scheduling="on"), [resumed])["r"]) == whole


def test_logprobs_are_those_of_the_models_own_distribution(tiny: "TinyModel", theirs: Any) -> None:
    asked = request("r", logprobs=4, frequency_penalty=1.5, logit_bias=((9, -5.0),))
    deltas = run(tiny.engine(async_scheduling="on"), [asked, request("other", logprobs=0), *PLAIN])["r"]
    _, expected = oracle(theirs, asked)
    reports = [report for item in deltas for report in item.logprobs]
    assert len(reports) == len(expected) == 24
    for token, report, raw in zip(tokens(deltas), reports, expected, strict=True):
        assert report.logprob == pytest.approx(float(raw[token]), abs=1e-4)
        assert report.ids[0] == int(raw.argmax()) and len(report.ids) == 4
        assert report.logprobs == pytest.approx(raw.topk(4).values.tolist(), abs=1e-4)


def test_every_row_gets_as_many_logprobs_as_it_asked_for(tiny: "TinyModel") -> None:
    asked = [request(str(count), PROMPT[count:], logprobs=count) for count in (0, 5, 2)]
    together = run(tiny.engine(), asked)
    for each in asked:
        reports = [report for item in together[each.id] for report in item.logprobs]
        assert [len(report.ids) for report in reports] == [each.params.logprobs] * 24
        alone = [report for item in run(tiny.engine(), [each])[each.id] for report in item.logprobs]
        assert [report.ids for report in reports] == [report.ids for report in alone]


def test_a_sampled_answer_with_logprobs_is_the_one_without(tiny: "TinyModel") -> None:
    plain = request("r", temperature=1.0, top_p=0.9, seed=3)
    asked = replace(plain, params=replace(plain.params, logprobs=1))
    assert tokens(run(tiny.engine(), [asked])["r"]) == tokens(run(tiny.engine(), [plain])["r"])


def test_broken_logits_end_their_request_only(tiny: "TinyModel") -> None:
    poisoned = type(tiny)(tiny.hf_config, tiny.config, dict(tiny.state))
    embed = poisoned.state["model.embed_tokens.weight"].clone()
    embed[90] = math.nan
    poisoned.state["model.embed_tokens.weight"] = embed
    engine = poisoned.engine(async_scheduling="on")
    engine.submit(request("bad", [10, 90], logprobs=2, presence_penalty=1.0))
    engine.submit(request("good", [10, 11], logprobs=2, presence_penalty=1.0, logit_bias=((90, -100.0),)))
    deltas: list[Delta] = []
    while engine.has_work():
        deltas += engine.step()
    failed = [item for item in deltas if item.request_id == "bad"]
    assert [(item.finish_reason, bool(item.error)) for item in failed] == [("error", True)]
    assert len(tokens([item for item in deltas if item.request_id == "good"])) == 24


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"presence_penalty": 2.1}, "presence_penalty must be -2 to 2"),
        ({"frequency_penalty": math.nan}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty must be 0.01"),
        ({"logit_bias": ((97, 1.0),)}, "logit_bias token id 97"),
        ({"logit_bias": ((-1, 1.0),)}, "logit_bias token id -1"),
        ({"logit_bias": ((5, 101.0),)}, "logit_bias of token 5"),
        ({"logit_bias": ((5, 1.0), (5, 2.0))}, "twice"),
        ({"logit_bias": tuple((t, 0.0) for t in range(1025))}, "more than 1024"),
        ({"logprobs": 21}, "logprobs must be 0 to 20"),
        ({"logprobs": True}, "logprobs must be 0 to 20"),
        ({"grammar": 5}, "grammar must be a string"),
    ],
)
def test_what_the_engine_refuses(tiny: "TinyModel", values: dict[str, Any], named: str) -> None:
    engine = tiny.engine()
    with pytest.raises(ValueError, match=named):
        engine.submit(request("r", **values))
    assert not engine.has_work()
