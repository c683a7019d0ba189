"""A text that is refused by its length could not have fitted, whatever it says."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

from stoker.runtime.gateway.text_bound import longest_token


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|im_start|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(["\u1f82 \u01d6 the theatre theatre        é é " * 50], trainer)
    return tokenizer


TOKENIZER = byte_level()
PIECES = st.sampled_from(
    ["theatre", "        ", "<|im_start|>", "α\u0313\u0300\u0345", "u\u0308\u0304", "1", "é", "\n"]
)


@given(st.lists(PIECES | st.text(), max_size=30).map("".join))
def test_no_token_covers_more(text: str) -> None:
    bound = longest_token(TOKENIZER.to_str().encode())
    assert bound is not None and bound == 2 * len("<|im_start|>")
    assert len(text) <= bound * len(TOKENIZER.encode(text).ids)


def changed(**parts: object) -> bytes:
    return json.dumps({**json.loads(TOKENIZER.to_str()), **parts}).encode()


@pytest.mark.parametrize(
    "parts",
    [
        {"pre_tokenizer": {"type": "Whitespace"}},
        {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "WhitespaceSplit"}]}},
        {"pre_tokenizer": {"type": "Split", "pattern": {"String": " "}, "behavior": "Removed", "invert": False}},
        {"normalizer": {"type": "Replace", "pattern": {"String": "long"}, "content": "l"}},
        {"normalizer": {"type": "Replace", "pattern": {"Regex": " +"}, "content": " "}},
        {"normalizer": {"type": "Strip", "strip_left": True, "strip_right": True}},
        {"added_tokens": [{"content": "x", "lstrip": True, "rstrip": False}]},
        {"model": {"type": "BPE", "vocab": {"a": 0}, "fuse_unk": True, "unk_token": "a", "byte_fallback": False}},
        {"pre_tokenizer": None, "model": {"type": "BPE", "vocab": {"a": 0}}},
        {"model": {"type": "WordPiece", "vocab": {"a": 0}}},
    ],
)
def test_there_is_none_where_text_can_vanish(parts: dict[str, object]) -> None:
    assert longest_token(changed(**parts)) is None


def test_a_replacement_that_is_no_shorter_loses_nothing() -> None:
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
    assert longest_token(changed(normalizer={"type": "Sequence", "normalizers": [replace]})) is not None
