"""Row 20: whatever a request asks for has an upper end, and asking for more costs the service next to nothing."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer

from stoker.runtime.grammar import (
    GrammarRefused,
    compiled,
    json_grammar,
    lark_grammar,
    regex_grammar,
    token_table,
    validate,
)
from tests.runtime.gateway.peers import error_of

SAID = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 5}
# What has no bound takes minutes, or for ever.
MOST_S = 10.0


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


def wide(count: int) -> dict[str, Any]:
    return {"type": "object", "properties": {f"field{i}": {"enum": [f"value{i}"]} for i in range(count)}}


TOO_MUCH: dict[str, tuple[dict[str, Any], str]] = {
    "n": ({"n": 33}, "n"),
    "n negative": ({"n": -1}, "n"),
    "max_tokens": ({"max_tokens": 10**6}, "max_tokens"),
    "max_tokens beyond 64 bits": ({"max_tokens": 10**30}, "max_tokens"),
    "max_completion_tokens": ({"max_completion_tokens": 10**7}, "max_tokens"),
    "top_logprobs": ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    "stops": ({"stop": [str(i) for i in range(5)]}, "stop"),
    "a long stop": ({"stop": "x" * 2000}, "stop"),
    "a long stop in a list": ({"stop": ["y", "x" * 2000]}, "stop"),
    "temperature": ({"temperature": 1e9}, "temperature"),
    "top_k": ({"top_k": 2**40}, "top_k"),
    "logit_bias": ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
    "tools": ({"tools": [{"type": "function", "function": {"name": f"f{i}"}} for i in range(129)]}, "tools"),
    "a long regex": ({"structured_outputs": {"regex": "(ab|cd)?" * 18_000}}, "structured_outputs"),
    "many choices": ({"structured_outputs": {"choice": [f"choice {i}" for i in range(12_000)]}}, "structured_outputs"),
}


@pytest.mark.parametrize("case", TOO_MUCH)
async def test_asking_for_too_much_is_refused_at_once(case: str, http: httpx.AsyncClient, chat_model: str) -> None:
    asked, param = TOO_MUCH[case]
    began = time.monotonic()
    response = await http.post("/v1/chat/completions", json={"model": chat_model, **SAID, **asked})
    seconds = time.monotonic() - began
    error = error_of(response)
    assert (response.status_code, str(error["param"]).partition(".")[0]) == (400, param), error
    assert seconds < MOST_S


HOSTILE: dict[str, Callable[[], str]] = {
    "deep": lambda: json_grammar(nested(150)),
    "wide": lambda: json_grammar(wide(1500)),
    "long": lambda: json_grammar({"type": "array", "items": {"type": "string"}, "minItems": 10**7}),
    "long strings": lambda: json_grammar({"type": "string", "minLength": 10**6, "maxLength": 10**7}),
    "powers": lambda: regex_grammar("((a{1,1000}){1,1000}){1,1000}"),
    "backtracking": lambda: regex_grammar("(a|a)*(a|a)*(a|a)*(a|a)*(a|a)*b"),
    "states": lambda: regex_grammar("(a|b)*a(a|b){400}"),
    "ambiguous": lambda: lark_grammar('start: s\ns: s s | "a" | '),
    "left recursion": lambda: lark_grammar('start: a\na: b "x"\nb: a | b b | "y"'),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_grammar_is_refused_or_followed_at_a_bounded_cost(name: str, smollm2_dir: Path) -> None:
    """Compiled and followed over 20 tokens, as the engine does it: an error is as good as an answer, if it is soon."""
    tokenizer = (smollm2_dir / "tokenizer.json").read_text()
    table, word = token_table(tokenizer, 49152, [2]), Tokenizer.from_str(tokenizer).encode("a").ids[0]
    began = time.process_time()
    try:
        matcher = compiled(validate(HOSTILE[name]()), table)
        slowest = 0.0
        for _ in range(20):
            step = time.process_time()
            matcher.compute_bitmask()
            if matcher.is_error() or not matcher.consume_tokens([word]):
                break
            slowest = max(slowest, time.process_time() - step)
        assert slowest < 0.5
    except GrammarRefused:
        pass
    assert time.process_time() - began < MOST_S


@pytest.mark.parametrize(
    "body",
    [{"input": ["x"] * 3000}, {"input": [[1]] * 3000}, {"input": "x", "dimensions": 0}],
    ids=["texts", "token lists", "dimensions"],
)
async def test_embeddings_are_bounded(body: dict[str, Any], http: httpx.AsyncClient) -> None:
    response = await http.post("/v1/embeddings", json={"model": "m", **body})
    assert response.status_code == 400, response.text


async def test_json_that_is_nested_without_end_is_a_bad_request(http: httpx.AsyncClient) -> None:
    for text in (b"[" * 100_000, b'{"a":' * 30_000, b'{"model": ' + b"[" * 90_000 + b"]" * 90_000 + b"}"):
        response = await http.post("/v1/chat/completions", content=text)
        assert response.status_code == 400
        error_of(response)
