"""Answers by a grammar, under random weights: whatever the model likes, what comes out is valid."""

import json
import re
from typing import TYPE_CHECKING, Any

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from stoker.runtime.engine.engine import Engine
from stoker.runtime.engine.grammars import Grammars
from stoker.runtime.engine.request import Delta, GenerationRequest, SamplingParams
from stoker.runtime.grammar import json_grammar, lark_grammar, regex_grammar

if TYPE_CHECKING:
    from conftest import TinyModel

END = 5
PROMPT = list(range(10, 30))


def ascii_tokenizer() -> Tokenizer:
    """97 tokens: the printable characters as byte-level BPE writes them, one pair, and the end."""
    letters = [chr(code) for code in range(33, 127)] + ["\u0120"]
    vocabulary = dict(zip([*letters[:END], "<end>", *letters[END:], '",'], range(97), strict=True))
    tokenizer = Tokenizer(models.BPE(vocabulary, [('"', ",")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    tokenizer.add_special_tokens(["<end>"])
    return tokenizer


TOKENIZER = ascii_tokenizer()


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(TOKENIZER.to_str(), 97, (END,))


def engine_of(tiny: "TinyModel", grammars: Grammars, **options: Any) -> Engine:
    engine = tiny.engine(**{"async_scheduling": "on", "max_model_len": 128, **options})
    engine.grammars = grammars
    return engine


def request(name: str, grammar: str = "", seed: int = 0, **values: Any) -> GenerationRequest:
    params = SamplingParams(**{"max_tokens": 100, "temperature": 1.0, "seed": seed, "grammar": grammar, **values})
    return GenerationRequest(name, PROMPT, params)


def run(engine: Engine, requests: list[GenerationRequest]) -> dict[str, tuple[list[int], str]]:
    deltas: list[Delta] = []
    for each in requests:
        engine.submit(each)
    while engine.has_work():
        deltas += engine.step()
    assert engine.stats()["used_blocks"] == 0
    answers: dict[str, tuple[list[int], str]] = {}
    for item in deltas:
        assert item.finish_reason not in ("error", "refused"), item.error
        answers[item.request_id] = (answers.get(item.request_id, ([], ""))[0] + item.tokens, item.finish_reason or "")
    return answers


def text(tokens: list[int]) -> str:
    return TOKENIZER.decode(tokens)


SCHEMAS: dict[str, dict[str, Any]] = {
    "bounded object": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 4},
            "n": {"type": "integer", "minimum": 0, "maximum": 9},
        },
        "required": ["name", "n"],
        "additionalProperties": False,
    },
    "choice": {"enum": ["red", "green", 7, None]},
    "list": {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 4},
    "nested": {
        "type": "object",
        "properties": {"a": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/b"}]}},
        "required": ["a"],
        "additionalProperties": False,
        "$defs": {"b": {"type": "array", "items": {"const": 1}, "maxItems": 2}},
    },
}


@pytest.mark.parametrize("schema", SCHEMAS.values(), ids=SCHEMAS)
def test_json_is_complete_and_valid(tiny: "TinyModel", grammars: Grammars, schema: dict[str, Any]) -> None:
    asked = [request(str(seed), json_grammar(schema), seed) for seed in range(6)]
    for tokens, reason in run(engine_of(tiny, grammars), asked).values():
        assert reason == "stop"
        jsonschema.validate(json.loads(text(tokens)), schema)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_regular_expressions(tiny: "TinyModel", grammars: Grammars, temperature: float) -> None:
    pattern = r"(ab|c){2,5}-[0-9]{3}"
    asked = [request(str(seed), regex_grammar(pattern), seed, temperature=temperature) for seed in range(5)]
    answers = [text(tokens) for tokens, _ in run(engine_of(tiny, grammars), asked).values()]
    assert all(re.fullmatch(pattern, answer) for answer in answers)
    assert len(set(answers)) == (1 if temperature == 0 else 5)


def test_a_context_free_grammar(tiny: "TinyModel", grammars: Grammars) -> None:
    lark = 'start: "(" start ")" | "x"'
    for tokens, reason in run(
        engine_of(tiny, grammars), [request(str(s), lark_grammar(lark), s) for s in range(5)]
    ).values():
        answer = text(tokens)
        depth = answer.count("(")
        assert answer == "(" * depth + "x" + ")" * depth if reason == "stop" else set(answer) <= {"(", "x", ")"}


def test_other_rows_are_left_alone_and_schedules_change_nothing(tiny: "TinyModel", grammars: Grammars) -> None:
    asked = [request(f"json {i}", json_grammar(schema), i, logprobs=1) for i, schema in enumerate(SCHEMAS.values())]
    plain = [request(f"plain {i}", seed=i, max_tokens=30) for i in range(3)]
    plain.append(request("penalised", seed=9, max_tokens=30, presence_penalty=1.0))
    alone = {each.id: run(engine_of(tiny, grammars), [each])[each.id] for each in [*asked, *plain]}
    for options in ({}, {"async_scheduling": "off"}, {"num_blocks": 8}, {"max_seqs": 3, "token_budget": 9}):
        engine = engine_of(tiny, grammars, **options)
        assert run(engine, [*asked, *plain]) == alone
        assert bool(engine.stats()["preemptions"]) == ("num_blocks" in options)


def test_a_resumed_answer_goes_on_within_its_grammar(tiny: "TinyModel", grammars: Grammars) -> None:
    asked = request("r", json_grammar(SCHEMAS["bounded object"]), seed=2)
    whole, _ = run(engine_of(tiny, grammars), [asked])["r"]
    resumed = GenerationRequest("r", PROMPT, asked.params, whole[:5])
    assert whole[:5] + run(engine_of(tiny, grammars), [resumed])["r"][0] == whole


def test_length_cuts_an_answer_that_is_valid_so_far(tiny: "TinyModel", grammars: Grammars) -> None:
    asked = request("r", json_grammar(SCHEMAS["bounded object"]), max_tokens=6)
    tokens, reason = run(engine_of(tiny, grammars), [asked])["r"]
    assert (len(tokens), reason) == (6, "length") and text(tokens).startswith('{"name')


def test_the_end_is_the_grammars_even_when_the_models_end_is_ignored(tiny: "TinyModel", grammars: Grammars) -> None:
    asked = request("r", regex_grammar("[a-c]{3}"), ignore_eos=True)
    assert run(engine_of(tiny, grammars), [asked])["r"][1] == "stop"


def failures(engine: Engine) -> dict[str, str]:
    found: dict[str, str] = {}
    while engine.has_work():
        found |= {item.request_id: item.error for item in engine.step() if item.finish_reason == "refused"}
    return found


def test_a_grammar_that_does_not_compile_ends_its_request_only(tiny: "TinyModel", grammars: Grammars) -> None:
    engine = engine_of(tiny, grammars)
    engine.submit(request("bad", regex_grammar("[a-z")))
    engine.submit(request("impossible", json_grammar({"type": "integer", "minimum": 5, "maximum": 3})))
    engine.submit(request("endless", lark_grammar("start: start")))
    engine.submit(request("long", regex_grammar("a{50000}")))
    engine.submit(request("good", max_tokens=3))
    found = failures(engine)
    assert set(found) == {"bad", "impossible", "endless", "long"}
    assert "invalid regex" in found["bad"] and "Unsatisfiable" in found["impossible"]


def test_without_a_tokenizer_grammars_are_refused(tiny: "TinyModel") -> None:
    engine = tiny.engine()
    with pytest.raises(ValueError, match="without a tokenizer"):
        engine.submit(request("r", regex_grammar("a"), max_tokens=5))
    assert not engine.has_work()


def test_aborting_at_every_moment(tiny: "TinyModel", grammars: Grammars) -> None:
    for steps in range(8):
        engine = engine_of(tiny, grammars)
        engine.submit(request("r", json_grammar(SCHEMAS["bounded object"])))
        for _ in range(steps):
            engine.step()
        engine.abort("r")
        assert [item.finish_reason for item in engine.step()][:1] == ["abort"]
        failures(engine)
        assert engine.stats()["used_blocks"] == 0


def nested(inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    arrays = st.builds(lambda item: {"type": "array", "items": item, "maxItems": 2}, inner)
    return arrays | st.dictionaries(st.sampled_from("pqr"), inner, max_size=2).map(
        lambda items: {"type": "object", "properties": items, "required": sorted(items), "additionalProperties": False}
    )


SCALARS = st.sampled_from(
    [{"type": "boolean"}, {"type": "null"}, {"enum": ["a", 1]}, {"type": "string", "maxLength": 3}]
)
VALUES = SCALARS | nested(SCALARS | nested(SCALARS))


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(schema=VALUES, seed=st.integers(0, 1000))
def test_any_schema_of_a_family(tiny: "TinyModel", grammars: Grammars, schema: dict[str, Any], seed: int) -> None:
    [(tokens, reason)] = run(engine_of(tiny, grammars), [request("r", json_grammar(schema), seed)]).values()
    if reason == "stop":
        jsonschema.validate(json.loads(text(tokens)), schema)
    else:
        assert len(tokens) == 100
