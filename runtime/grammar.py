"""Answers that follow a grammar, with llguidance: what a request may ask for, compiled within limits. Imports no torch,
so that the gateway can refuse what doesn't compile and the engine can compile the same again."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

MAX_GRAMMAR_BYTES = 128 << 10
# What one request may cost: about 20 ms to set up, 10 ms per token, 40 MB.
LIMITS = LLParserLimits(
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=100_000,
    step_max_items=50_000,
    max_lexer_states=20_000,
    max_grammar_size=100_000,
    verbose_errors=False,
)
COMPACT_JSON = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
ANY_OBJECT = {"type": "object"}


class GrammarRefused(ValueError):
    """A grammar that doesn't compile, is too large, or that no text satisfies; the message says which."""


def json_grammar(schema: Mapping[str, Any]) -> str:
    """Of JSON texts that are valid against `schema`. Raises GrammarRefused."""
    try:
        return LLMatcher.grammar_from_json_schema(json.dumps(schema), defaults=COMPACT_JSON)  # type: ignore[arg-type]
    except ValueError as error:
        raise GrammarRefused(str(error)) from error


def regex_grammar(pattern: str) -> str:
    return LLMatcher.grammar_from_regex(pattern)


def lark_grammar(text: str) -> str:
    return LLMatcher.grammar_from_lark(text)


def choice_grammar(choices: Sequence[str]) -> str:
    return LLMatcher.grammar_from_lark("start: " + " | ".join(json.dumps(choice) for choice in choices))


def validate(grammar: str) -> str:
    """The same grammar. Raises GrammarRefused for one that `compiled` would refuse for any model."""
    check_size(grammar)
    broken, messages = LLMatcher.validate_grammar_with_warnings(grammar, None, limits=LIMITS)
    if broken:
        raise GrammarRefused(first_line(messages[0]))
    return grammar


def check_size(grammar: str) -> None:
    if len(grammar) > MAX_GRAMMAR_BYTES:
        raise GrammarRefused(f"the grammar has {len(grammar)} characters, over the limit of {MAX_GRAMMAR_BYTES}")


def token_table(tokenizer_json: str, vocabulary: int, ends: Sequence[int]) -> LLTokenizer:
    """The bytes of every token of a Hugging Face tokenizer. `ends` are the tokens that may follow a complete text."""
    if not ends:
        raise GrammarRefused("this model has no end-of-sequence token, so an answer by a grammar could never end")
    return LLTokenizer(tokenizer_json, n_vocab=vocabulary, eos_token=list(ends))


def compiled(grammar: str, tokens: LLTokenizer) -> LLMatcher:
    """A matcher at the start of the text. Raises GrammarRefused. May take a second, without the interpreter's lock."""
    check_size(grammar)
    matcher = LLMatcher(tokens, grammar, log_level=0, limits=LIMITS)
    if not matcher.is_error():
        matcher.compute_bitmask()
    if matcher.is_error():
        raise GrammarRefused(first_line(matcher.get_error()))
    return matcher


def first_line(message: str) -> str:
    return message.strip().partition("\n")[0]
