"""Builds Hugging Face tokenizer documents from the token table of a GGUF file."""

import json
from pathlib import Path
from typing import Any

from gguf import TokenType
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from stoker.coldstart.failures import UnsupportedModel

BYTE_PAIR = "gpt2"
DIGITS_APART = "smollm"


def tokenizer_documents(path: Path, metadata: dict[str, Any]) -> dict[str, str]:
    """File name -> JSON text. Raises UnsupportedModel for a tokenizer whose pre-tokeniser isn't known here."""
    kind, splitting = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    if kind != BYTE_PAIR or splitting != DIGITS_APART:
        known = f"known: {BYTE_PAIR} with {DIGITS_APART}"
        raise UnsupportedModel(str(path), None, f"tokenizer {kind} with pre-tokeniser {splitting} ({known})")
    return {
        "tokenizer.json": byte_pair_tokenizer(metadata).to_str(pretty=False),
        "tokenizer_config.json": json.dumps(tokenizer_config(metadata), indent=2, ensure_ascii=False),
    }


def byte_pair_tokenizer(metadata: dict[str, Any]) -> Tokenizer:
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    types: list[int] = metadata["tokenizer.ggml.token_type"]
    merges = [(left, right) for left, right in (merge.split(" ") for merge in metadata["tokenizer.ggml.merges"])]
    tokenizer = Tokenizer(models.BPE(vocab={token: number for number, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(added(tokens, types, TokenType.CONTROL, special=True))
    tokenizer.add_tokens(added(tokens, types, TokenType.USER_DEFINED, special=False))
    return tokenizer


def added(tokens: list[str], types: list[int], wanted: TokenType, *, special: bool) -> list[AddedToken]:
    found = [token for token, kind in zip(tokens, types, strict=True) if kind == wanted]
    return [AddedToken(token, special=special, normalized=False) for token in found]


def tokenizer_config(metadata: dict[str, Any]) -> dict[str, Any]:
    tokens = metadata["tokenizer.ggml.tokens"]
    parts = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    keys = {name: f"tokenizer.ggml.{part}_token_id" for name, part in parts.items()}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": metadata["llama.context_length"],
        **{name: tokens[metadata[key]] for name, key in keys.items() if key in metadata},
        **({"chat_template": metadata["tokenizer.chat_template"]} if "tokenizer.chat_template" in metadata else {}),
    }
