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
    assert await answer_grammar(chat_request({**CHAT, **fields})) == ""


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
        assert await answer_grammar(request)


@pytest.mark.parametrize(
    ("fields", "param", "named"),
    [
        (schema_format({"type": "integer", "minimum": 5, "maximum": 3}), "response_format", "Unsatisfiable"),
        (schema_format({"type": "nothing"}), "response_format", "Invalid type"),
        (schema_format({"$ref": "#/$defs/no"}), "response_format", "no"),
        (schema_format({"const": "x" * MAX_GRAMMAR_BYTES}), "response_format", "over the limit of 131072"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs", "regex"),
        ({"structured_outputs": {"grammar": "start: /a/ b"}}, "structured_outputs", "unknown name"),
    ],
)
async def test_refusals_say_why(fields: dict[str, Any], param: str, named: str) -> None:
    with pytest.raises(ApiError, match=named) as caught:
        await answer_grammar(chat_request({**CHAT, **fields}))
    assert (caught.value.status, caught.value.param, caught.value.code) == (400, param, "invalid_grammar")
