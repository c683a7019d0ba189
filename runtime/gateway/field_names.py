"""Names of request fields. What nobody here knows is ignored, because clients send their vendors' extras to everyone;
but a name one slip away from a known one is a mistake, and the answer would silently lack what was asked for."""

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

from pydantic import BaseModel

from stoker.runtime.gateway.errors import bad_request

LEAST_LENGTH = 6
MOST_LOOKED_AT = 50


def refuse_misspelt(kind: type[BaseModel], fields: Mapping[str, Any]) -> None:
    """Raises ApiError 400 for a field of a request of this kind that is not null."""
    known = {info.alias or name for name, info in kind.model_fields.items()}
    unknown = (name for name, value in fields.items() if name not in known and value is not None)
    for name in islice(unknown, MOST_LOOKED_AT):
        if meant := likeliest(name, known - fields.keys()):
            message = f"Unknown parameter: '{name}'. Did you mean '{meant}'?"
            raise bad_request(message, param=name, code="unknown_parameter")


def likeliest(name: str, known: Iterable[str]) -> str | None:
    """The known name that `name` is one slip away from: a letter too many, too few, wrong, or two exchanged; or only
    written in another style, like maxTokens. Short names are never taken for others."""
    for other in sorted(known):
        if min(len(name), len(other)) >= LEAST_LENGTH and (plain(name) == plain(other) or one_slip(name, other)):
            return other
    return None


def plain(name: str) -> str:
    return "".join(filter(str.isalnum, name)).lower()


def one_slip(name: str, other: str) -> bool:
    return abs(len(name) - len(other)) <= 1 and any(slipped == name for slipped in slips(other, name))


def slips(word: str, wanted: str) -> Iterator[str]:
    """`word` with the one slip at its first difference from `wanted` that could make it `wanted`."""
    place = next((n for n, (a, b) in enumerate(zip(word, wanted, strict=False)) if a != b), min(len(word), len(wanted)))
    head, tail = word[:place], word[place:]
    yield head + tail[1:]
    yield head + wanted[place : place + 1] + tail
    yield head + wanted[place : place + 1] + tail[1:]
    yield head + tail[1:2] + tail[:1] + tail[2:]
