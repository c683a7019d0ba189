from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.runtime.tenancy.price import InvalidPrice, Price, Quantities, amount


def test_each_kind_is_charged_at_its_own_price() -> None:
    price = Price(request=0.001, second=0.002, prompt_tokens=1.0, cached_tokens=0.1, completion_tokens=4.0)
    used = Quantities(1, 500_000, prompt_tokens=1000, cached_tokens=400, completion_tokens=200)
    assert amount(price, used) == 1000 + 1000 + 600 + 40 + 800


def test_the_smallest_use_of_what_costs_something_is_not_free() -> None:
    assert amount(Price(prompt_tokens=0.01), Quantities(prompt_tokens=1)) == 1
    assert amount(Price(), Quantities(prompt_tokens=10**9, run_us=10**12)) == 0


@given(st.integers(0, 10**6), st.integers(0, 10**6), st.floats(0, 100), st.floats(0, 100))
def test_a_cached_token_never_costs_both_prices(prompt: int, cached: int, full: float, reduced: float) -> None:
    cached = min(cached, prompt)
    price = Price(prompt_tokens=full, cached_tokens=reduced)
    charged = amount(price, Quantities(prompt_tokens=prompt, cached_tokens=cached))
    assert abs(charged - ((prompt - cached) * full + cached * reduced)) <= 1.001


@pytest.mark.parametrize("data", [{"second": -1}, {"second": "1"}, {"request": True}, {"minute": 1}])
def test_prices_that_cannot_be_charged_are_named(data: dict[str, Any]) -> None:
    with pytest.raises(InvalidPrice, match=next(iter(data))):
        Price.from_dict(data)
