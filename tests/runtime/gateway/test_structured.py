"""From a request's words about its answer to a grammar, or to a refusal that says why."""

from typing import Any

import pytest

from stoker.runtime.gateway.errors import ApiError
from stoker.runtime.gateway.schema import chat_request, completion_request
from stoker.runtime.gateway.structured import answer_grammar
from stoker.runtime.grammar import MAX_GRAMMAR_BYTES

CHAT = {"model": "m", "messages": [{"role": "user", "content": "x"}]}


def schema_format(schema: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}}


@pytest.mark.parametrize("fields", [{}, {"response_format": {"type": "text"}}, {"response_format": None}])
async def test_most_requests_take_any_answer(fields: dict[str, Any]) -> None:
    assert await answer_grammar(chat_request({**CHAT, **fields}), (2,)) == ""


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_object"}},
        schema_format({"type": "object", "properties": {"a": {"type": "integer"}}}),
        {"structured_outputs": {"json": {"type": "array"}}},
        {"structured_outputs": {"regex": "[a-z]+"}},
        {"structured_outputs": {"grammar": 'start: "a" | "b"'}},
        {"structured_outputs": {"choice": ['say "yes"', "nein\n"]}},
    ],
)
async def test_every_form_compiles_for_both_routes(fields: dict[str, Any]) -> None:
    for request in (chat_request({**CHAT, **fields}), completion_request({"model": "m", "prompt": "x", **fields})):
        assert await answer_grammar(request, (2,))


@pytest.mark.parametrize(
    ("fields", "param", "named"),
    [
        (schema_format({"type": "integer", "minimum": 5, "maximum": 3}), "response_format", "Unsatisfiable"),
        (schema_format({"type": "nothing"}), "response_format", "Invalid type"),
        (schema_format({"$ref": "#/$defs/no"}), "response_format", "no"),
        (schema_format({"const": "x" * MAX_GRAMMAR_BYTES}), "response_format", "over the limit of 131072"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs", "regex"),
        ({"structured_outputs": {"grammar": "start: /a/ b"}}, "structured_outputs", "unknown name"),
        (schema_format({"$ref": "#"}), "response_format", "refers to itself"),
        (schema_format({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}), "response_format", "refers to"),
        ({"structured_outputs": {"grammar": "start: start"}}, "structured_outputs", "refers to itself"),
        ({"structured_outputs": {"grammar": "start: a\na: start"}}, "structured_outputs", "refers to itself"),
        ({"structured_outputs": {"choice": ["a" * 100_000]}}, "structured_outputs", "too long"),
        (
            {"structured_outputs": {"choice": ["a" * 9000 + x for x in "bcdefghijklmn"]}},
            "structured_outputs",
            "too long",
        ),
        ({"structured_outputs": {"regex": "a{50000}"}}, "structured_outputs", "too long"),
        ({"structured_outputs": {"grammar": 'start: "x" LONG\nLONG: /a{50000}/'}}, "structured_outputs", "too long"),
        (schema_format({"const": "a lot of text " * 6000}), "response_format", "too long"),
    ],
)
async def test_refusals_say_why(fields: dict[str, Any], param: str, named: str) -> None:
    with pytest.raises(ApiError, match=named) as caught:
        await answer_grammar(chat_request({**CHAT, **fields}), (2,))
    assert (caught.value.status, caught.value.param, caught.value.code) == (400, param, "invalid_grammar")


@pytest.mark.parametrize(
    "fields",
    [
        schema_format({"enum": [f"value {number}" for number in range(4000)]}),
        schema_format({"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(400)}}),
        schema_format({"type": "string", "maxLength": 10_000}),
        {"structured_outputs": {"choice": ["a" * 10_000]}},
        {"structured_outputs": {"regex": "[a-z]{0,1000}"}},
    ],
    ids=["enum", "properties", "maxLength", "choice", "regex"],
)
async def test_large_ones_that_cost_little_are_taken(fields: dict[str, Any]) -> None:
    assert await answer_grammar(chat_request({**CHAT, **fields}), (2,))


async def test_a_model_that_has_no_end_has_no_grammar() -> None:
    assert await answer_grammar(chat_request(CHAT), ()) == ""
    with pytest.raises(ApiError, match="no end-of-sequence token"):
        await answer_grammar(chat_request({**CHAT, "response_format": {"type": "json_object"}}), ())
