"""The prices that entries were entered at, for those who read the entries later: it may have changed since. Pure."""

from dataclasses import dataclass, replace
from typing import Any

from stoker.runtime.tenancy.price import Price

Period = tuple[str, Price]


def place(id: str) -> tuple[int, int]:
    """A stream id's place among others."""
    milliseconds, _, number = id.partition("-")
    return int(milliseconds), int(number or 0)


@dataclass(frozen=True, slots=True)
class PriceHistory:
    """Of one function: each price with the id of the first entry that it was for, in order."""

    periods: tuple[Period, ...] = ()

    def at(self, id: str) -> Price | None:
        """None for what is older than the history."""
        known = [price for first, price in self.periods if place(first) <= place(id)]
        return known[-1] if known else None

    def noted(self, id: str, price: Price) -> "PriceHistory":
        """With `price` for the entry `id` and those behind it; itself when it said so already."""
        return self if self.at(id) == price else replace(self, periods=(*self.periods, (id, price)))

    def behind(self, id: str) -> "PriceHistory":
        """What matters to entries behind `id`."""
        past = [period for period in self.periods if place(period[0]) <= place(id)]
        return replace(self, periods=(*past[-1:], *self.periods[len(past) :]))

    def to_list(self) -> list[Any]:
        return [[first, price.to_dict()] for first, price in self.periods]

    @classmethod
    def from_list(cls, data: list[Any]) -> "PriceHistory":
        return cls(tuple((first, Price.from_dict(price)) for first, price in data))
