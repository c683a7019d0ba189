"""Tool calls are found in a model's text however it is cut, and what is no call stays content."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.runtime.gateway.tool_calls import ToolSplitter, forced_grammar, message_of, tool_style
from stoker.runtime.grammar import lark_grammar, validate

ARGUMENTS = '{"a": "x}\\"y", "b": [1, {"c": 2}], "d": "ü"}'
CALL = f'<tool_call>\n{{"name": "get", "arguments": {ARGUMENTS}}}\n</tool_call>'


def whole(style: Any, text: str) -> dict[str, Any]:
    splitter = ToolSplitter(style, "call")
    return message_of([*splitter.feed(text), *splitter.finish()])


def called(*functions: tuple[str, str]) -> list[dict[str, Any]]:
    return [
        {"id": f"call-{index}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for index, (name, arguments) in enumerate(functions)
    ]


HERMES = {
    CALL: {"content": None, "tool_calls": called(("get", ARGUMENTS))},
    f"Let me see. {CALL}\n{CALL}": {
        "content": "Let me see. ",
        "tool_calls": called(("get", ARGUMENTS), ("get", ARGUMENTS)),
    },
    f"{CALL}\n\nDone.": {"content": "Done.", "tool_calls": called(("get", ARGUMENTS))},
    '<tool_call>{"name":"z","arguments":{}}</tool_call>': {"content": None, "tool_calls": called(("z", "{}"))},
    '<tool_call>{"name":"z","arguments":5 }</tool_call>': {"content": None, "tool_calls": called(("z", "5"))},
    "no call": {"content": "no call"},
    "": {"content": ""},
    "a <tool and </tool_call>": {"content": "a <tool and </tool_call>"},
    "<tool_call>garbage</tool_call> after": {"content": "<tool_call>garbage</tool_call> after"},
    '<tool_call>{"nam': {"content": '<tool_call>{"nam'},
    '<tool_call>{"name": "cut", "arguments": {"a": 1': {"content": None, "tool_calls": called(("cut", '{"a": 1'))},
}
LLAMA = {
    f'{{"name": "get", "parameters": {ARGUMENTS}}}': {"content": None, "tool_calls": called(("get", ARGUMENTS))},
    '  {"name":"z", "parameters":{}} ': {"content": None, "tool_calls": called(("z", "{}"))},
    'Paris. {"name": "f", "parameters": {}}': {"content": 'Paris. {"name": "f", "parameters": {}}'},
    '{"city": "Paris"}': {"content": '{"city": "Paris"}'},
}
TEXTS = [("hermes", *item) for item in HERMES.items()] + [("llama", *item) for item in LLAMA.items()]


@pytest.mark.parametrize(("style", "text", "message"), TEXTS)
def test_calls_and_content(style: str, text: str, message: dict[str, Any]) -> None:
    assert whole(style, text) == message


@pytest.mark.parametrize(
    ("style", "text", "name"),
    [
        ("hermes", '<tool_call>\n{"name": "get"', "get"),
        ("hermes", '<tool_call>{"name": "g\\"t", "argu', 'g"t'),
        ("hermes", '<tool_call>{"name": "get", "arguments": ', "get"),
        ("llama", '{"name": "get", "param', "get"),
        ("hermes", '<tool_call>{"name": "ge', ""),
        ("hermes", '<tool_call>{"name": "get", "other', ""),
        ("llama", '{"name": "Paris", "population', ""),
        ("llama", '{"city": "Paris"', ""),
    ],
)
def test_a_call_that_is_cut_off_behind_its_name_is_one(style: Any, text: str, name: str) -> None:
    """Only where the text was to go on."""
    expected = {"content": None, "tool_calls": called((name, ""))} if name else {"content": text}
    for size in (1, 3, len(text)):
        splitter = ToolSplitter(style, "call")
        deltas = [delta for at in range(0, len(text), size) for delta in splitter.feed(text[at : at + size])]
        assert message_of([*deltas, *splitter.finish(cut=True)]) == expected
    assert whole(style, text) == {"content": text}


@settings(max_examples=300, deadline=None)
@given(case=st.sampled_from(TEXTS), cuts=st.lists(st.integers(0, 200), max_size=20))
def test_no_cut_changes_the_message(case: tuple[str, str, dict[str, Any]], cuts: list[int]) -> None:
    style, text, message = case
    places = [0, *sorted({min(cut, len(text)) for cut in cuts}), len(text)]
    splitter = ToolSplitter(style, "call")  # type: ignore[arg-type]
    deltas = [delta for a, b in zip(places, places[1:], strict=False) for delta in splitter.feed(text[a:b])]
    assert message_of([*deltas, *splitter.finish()]) == message


def test_arguments_are_streamed_as_they_come() -> None:
    splitter = ToolSplitter("hermes", "call")
    assert splitter.feed('<tool_call>{"name": "f", "argu') == []
    head, first = splitter.feed('ments": {')
    assert first["tool_calls"][0] == {"index": 0, "function": {"arguments": "{"}}
    assert head["tool_calls"][0]["function"] == {"name": "f", "arguments": ""}
    fragments = [splitter.feed(piece) for piece in ('"a"', ": 1", "}", "}</tool_call>")]
    told = [delta["tool_calls"][0] for deltas in fragments for delta in deltas]
    assert [part["function"] for part in told] == [{"arguments": piece} for piece in ('"a"', ": 1", "}")]
    assert {part["index"] for part in told} == {0}


@pytest.mark.parametrize(
    ("template", "style"),
    [
        ("{% if tools %}<tool_call>{% endif %}", "hermes"),
        ('{% if tools %}{"name": function name, "parameters": ...}{% endif %}', "llama"),
        ("{{ messages }}", ""),
        ("{% if tools %}[AVAILABLE_TOOLS]{% endif %}", ""),
    ],
)
def test_the_template_decides_the_style(template: str, style: str) -> None:
    assert tool_style(template) == style


@pytest.mark.parametrize("style", ["hermes", "llama"])
def test_a_forced_call_has_a_grammar(style: Any) -> None:
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    grammar = forced_grammar(style, [{"name": "get", "parameters": parameters}, {"name": "now"}])
    assert validate(lark_grammar(grammar))
    assert json.dumps({"const": "now"}) in grammar
