"""What a router looks at in a request."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

HARD_WORDS = re.compile(
    r"\b(?:why|explain|compare|analy[sz]e|prove|derive|design|implement|refactor|optimi[sz]e|debug|evaluate|"
    r"step by step|trade-?offs?|pros and cons|difference between|algorithm|architecture)\b",
    re.IGNORECASE,
)
CODE = re.compile(r"```|\b(?:def|class|function|SELECT|import|#include)\b|[{};]\s*$", re.MULTILINE)
MATHS = re.compile(r"\d\s*[-+*/^=<>]\s*\d|\\[a-z]+\{|[∑∫√≤≥∂]")
LONG_CHARS = 1500
WEIGHTS = {"length": 0.3, "words": 0.35, "code": 0.2, "maths": 0.2, "questions": 0.15}


@dataclass(frozen=True, slots=True)
class Facts:
    """`text` is the last message, `chars` the length of the whole conversation."""

    text: str
    chars: int
    tools: bool = False
    structured: bool = False
    metadata: Mapping[str, str] = field(default_factory=dict)


def difficulty(text: str) -> float:
    """From 0 (small talk) to 1, by signs on the surface: length, words that ask for reasoning, code, maths, several
    questions at once."""
    signs = {
        "length": min(len(text) / LONG_CHARS, 1.0),
        "words": min(len(set(HARD_WORDS.findall(text.lower()))) / 2, 1.0),
        "code": float(bool(CODE.search(text))),
        "maths": float(bool(MATHS.search(text))),
        "questions": float(text.count("?") > 1),
    }
    return min(sum(WEIGHTS[name] * value for name, value in signs.items()), 1.0)
