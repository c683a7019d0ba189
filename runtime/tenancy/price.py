"""What a call costs, in integer micro-USD: no sum of bills ever differs from the bill of the sum by rounding."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, NamedTuple

MOST_USD = 1e6


class InvalidPrice(ValueError):
    """A price that can't be charged; the message says which and what to write instead."""


@dataclass(frozen=True, slots=True)
class Price:
    """US dollars: per request, per second that a job runs, and per million tokens by kind. Cached prompt tokens are
    charged as such and not as prompt tokens."""

    request: float = 0
    second: float = 0
    prompt_tokens: float = 0
    cached_tokens: float = 0
    completion_tokens: float = 0

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not number or not 0 <= value <= MOST_USD:
                raise InvalidPrice(f"{name} must be a number of US dollars from 0 to {MOST_USD:g}, not {value!r}")

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Price":
        if unknown := set(data) - {each.name for each in fields(cls)}:
            raise InvalidPrice(f"unknown price(s): {', '.join(sorted(unknown))}")
        return cls(**data)


FREE = Price()


class Quantities(NamedTuple):
    """What one job used, or may use at most."""

    requests: int = 1
    run_us: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0


def amount(price: Price, used: Quantities) -> int:
    """Micro-USD, rounded up once. `prompt_tokens` counts the cached ones too, as usage does."""
    dollars = (
        used.requests * price.request
        + used.run_us / 1e6 * price.second
        + (used.prompt_tokens - used.cached_tokens) / 1e6 * price.prompt_tokens
        + used.cached_tokens / 1e6 * price.cached_tokens
        + used.completion_tokens / 1e6 * price.completion_tokens
    )
    return math.ceil(round(dollars * 1e6, 6))
