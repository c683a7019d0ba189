"""Tenants' levels: who has had less goes first, a long absence buys a bounded credit, weights count."""

from hypothesis import given
from hypothesis import strategies as st

from stoker.runtime.pool.shares import CREDIT_S, Shares


def serve(shares: Shares, seconds: float, each: float, tenants: list[str]) -> dict[str, float]:
    """All tenants always have work, in pieces of `each`; the neediest is served."""
    had = dict.fromkeys(tenants, 0.0)
    for _ in range(round(seconds / each)):
        tenant = min(tenants, key=shares.level)
        shares.charge(tenant, each)
        had[tenant] += each
    return had


@given(st.lists(st.floats(0.1, 10), min_size=2, max_size=5))
def test_tenants_that_always_have_work_get_their_weights_shares(weights: list[float]) -> None:
    tenants = [f"t{number}" for number in range(len(weights))]
    shares = Shares()
    for tenant, weight in zip(tenants, weights, strict=True):
        shares.enter(tenant, weight)
    had = serve(shares, 200, 0.05, tenants)
    for tenant, weight in zip(tenants, weights, strict=True):
        assert abs(had[tenant] - 200 * weight / sum(weights)) <= 0.05 * (1 + weight / min(weights)) + 0.05 * len(
            tenants
        )


def test_who_comes_back_goes_first_for_as_long_as_its_credit_lasts() -> None:
    shares = Shares()
    shares.enter("noisy")
    serve(shares, 100, 0.1, ["noisy"])
    shares.enter("quiet")
    had = serve(shares, 4, 0.1, ["noisy", "quiet"])
    assert abs(had["quiet"] - (CREDIT_S + (4 - CREDIT_S) / 2)) < 0.3


def test_a_new_tenant_has_no_claim_on_what_others_had_before_it_came() -> None:
    shares = Shares()
    shares.enter("old")
    serve(shares, 1000, 1.0, ["old"])
    shares.leave("old")
    shares.enter("new")
    shares.enter("old")
    assert shares.level("old") - shares.level("new") <= CREDIT_S + 1


@given(st.lists(st.tuples(st.sampled_from("abc"), st.floats(0, 5)), max_size=50))
def test_credit_is_bounded(history: list[tuple[str, float]]) -> None:
    shares = Shares()
    for tenant, seconds in history:
        shares.enter(tenant)
        shares.charge(tenant, seconds)
        shares.leave(tenant)
    shares.enter("a")
    lowest = shares.level("a")
    shares.enter("b")
    assert shares.level("b") >= lowest - CREDIT_S
