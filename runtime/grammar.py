"""Answers that follow a grammar, with llguidance: what a request may ask for, compiled within limits. Imports no torch,
so that the gateway can refuse what doesn't compile and the engine can compile the same again."""

import json
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

MAX_GRAMMAR_BYTES = 128 << 10
# What one request may cost: about 60 ms to set up, 10 ms per token, 40 MB. The first of these counts about one for each
# character of the texts and patterns in it, and with their lengths a token gets dearer: 10,000 are about 2 ms.
LIMITS = LLParserLimits(
    initial_lexer_fuel=100_000,
    step_lexer_fuel=100_000,
    step_max_items=50_000,
    max_lexer_states=20_000,
    max_grammar_size=100_000,
    verbose_errors=False,
)
COMPACT_JSON = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
ERROR = "error: "
IN_OTHER_WORDS = {
    "NoExtensionBias": "no text satisfies it: it refers to itself without end",
    "too many expressions": "its texts and patterns are too long or too many",
    "lexer precomputation failed": "its texts and patterns are too long or too many",
}
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
        raise GrammarRefused(gist(messages[0]))
    compiled(grammar, byte_table())
    return grammar


@cache
def byte_table() -> LLTokenizer:
    """Of a model with a token for each byte, which stands for all models: what no text satisfies, or what is too dear
    to set up, is so for each of them."""
    vocabulary = {letter: number for number, letter in enumerate(sorted(ByteLevel.alphabet()))}
    end = len(vocabulary)
    tokenizer = Tokenizer(BPE({**vocabulary, "<end>": end}, []))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    tokenizer.decoder = ByteLevelDecoder()  # type: ignore[assignment]
    tokenizer.add_special_tokens(["<end>"])
    return token_table(tokenizer.to_str(), end + 1, [end])


def check_size(grammar: str) -> None:
    if len(grammar) > MAX_GRAMMAR_BYTES:
        raise GrammarRefused(f"the grammar has {len(grammar)} characters, over the limit of {MAX_GRAMMAR_BYTES}")


def check_ends(ends: Sequence[int]) -> None:
    if not ends:
        raise GrammarRefused("this model has no end-of-sequence token, so an answer by a grammar could never end")


def token_table(tokenizer_json: str, vocabulary: int, ends: Sequence[int]) -> LLTokenizer:
    """The bytes of every token of a Hugging Face tokenizer. `ends` are the tokens that may follow a complete text."""
    check_ends(ends)
    return LLTokenizer(tokenizer_json, n_vocab=vocabulary, eos_token=list(ends))


def compiled(grammar: str, tokens: LLTokenizer) -> LLMatcher:
    """A matcher at the start of the text. Raises GrammarRefused. May take a second, without the interpreter's lock."""
    check_size(grammar)
    matcher = LLMatcher(tokens, grammar, log_level=0, limits=LIMITS)
    check(matcher)
    first = int.from_bytes(matcher.compute_bitmask(), "little")
    check(matcher)
    # That it is over the first limit shows behind the first token only.
    trial = matcher.deep_copy()
    trial.consume_token((first & -first).bit_length() - 1)
    check(trial)
    return matcher


def check(matcher: LLMatcher) -> None:
    """Raises GrammarRefused."""
    if matcher.is_error():
        raise GrammarRefused(gist(matcher.get_error()))


def gist(message: str) -> str:
    """Its first line; where that only announces the error, with the line that tells it."""
    first, *rest = message.strip().splitlines()
    if known := next((words for sign, words in IN_OTHER_WORDS.items() if sign in first), ""):
        return known
    told = next((line.removeprefix(ERROR) for line in rest if line.startswith(ERROR)), "")
    return f"{first} {told}" if told and first.endswith(":") else first
