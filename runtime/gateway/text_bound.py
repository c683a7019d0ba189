"""How long a text may be so that it can have so few tokens: what can't fit is refused before anyone tokenises it."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tokenizers.pre_tokenizers import ByteLevel

COMPOSITION = 2
KEEP_ALL = {"NFC", "NFD", "NFKD", "Prepend", "ByteLevel", "Metaspace", "Digits", "Sequence"}


def longest_token(tokenizer_json: bytes) -> int | None:
    """The most characters of a text that one token can stand for; None where there is no such number, as in tokenizers
    that drop white space or make one unknown token of a whole word."""
    rules = json.loads(tokenizer_json)
    model, added = rules["model"], rules.get("added_tokens") or []
    if model.get("type") != "BPE" or any(each.get("lstrip") or each.get("rstrip") for each in added):
        return None
    steps = [step for part in ("normalizer", "pre_tokenizer") for step in flat(rules.get(part))]
    if not all(map(keeps_all, steps)) or not knows_all(model, steps):
        return None
    longest = max(map(len, (*model["vocab"], *(each["content"] for each in added))), default=1)
    return COMPOSITION * longest


def flat(step: Mapping[str, Any] | None) -> Iterator[Mapping[str, Any]]:
    if step is not None:
        yield step
        for each in (*step.get("normalizers", ()), *step.get("pretokenizers", ())):
            yield from flat(each)


def knows_all(model: Mapping[str, Any], steps: Sequence[Mapping[str, Any]]) -> bool:
    """Whether each unknown character is at least a token of its own: others are dropped, or many become one."""
    if any(step["type"] == "ByteLevel" for step in steps):
        return set(ByteLevel.alphabet()) <= model["vocab"].keys()
    if model.get("byte_fallback") and "<0x00>" in model["vocab"]:
        return True
    return bool(model.get("unk_token")) and not model.get("fuse_unk")


def keeps_all(step: Mapping[str, Any]) -> bool:
    """Whether every character of the text is still there behind it. NFC may compose some: three become no less than two
    bytes, which COMPOSITION is for."""
    if step["type"] == "Split":
        return step["behavior"] != "Removed"
    if step["type"] == "Replace":
        return len(step["pattern"].get("String", "")) in range(1, len(step["content"]) + 1)
    return step["type"] in KEEP_ALL
