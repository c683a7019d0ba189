"""Steps of others become longer by a share at most, whatever a further row costs on a device; and no device is left
idle where it costs nothing."""

from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from stoker.runtime.pool.leeway import BATCH_SHARE, PROBE, TENANTS_SHARE, Leeway

MOST = 16


def run(leeway: Leeway, rows: int, steps: int, step_s: Callable[[int], float]) -> tuple[float, int]:
    """All steps' length, and how many had work of those that give way. Each of these has one token in a step."""
    spent, mixed = 0.0, 0
    for _ in range(steps):
        tokens = leeway.tokens([1] * rows, 512)
        mixed += bool(tokens)
        spent += step_s(rows + tokens)
        leeway.took(rows, bool(tokens), step_s(rows + tokens))
    return spent, mixed


SHARES = st.sampled_from([TENANTS_SHARE, BATCH_SHARE])


@given(st.floats(1e-4, 1), st.floats(0, 1), st.floats(0.2, 1), st.integers(1, 8), SHARES)
def test_steps_of_others_become_longer_by_a_share(
    fixed: float, row: float, power: float, rows: int, share: float
) -> None:
    def step_s(tokens: int) -> float:
        return fixed + row * tokens**power

    leeway, steps = Leeway(MOST), 1000
    leeway.share = share
    spent, mixed = run(leeway, rows, steps, step_s)
    alone, extra = step_s(rows), step_s(rows + MOST) - step_s(rows)
    assert spent <= (1 + share) * steps * alone + 2 * extra
    allowed = steps * min(1.0, share * alone / extra if extra else 1.0)
    assert mixed >= 0.9 * allowed * (1 - 1 / PROBE) - 2, "nor less than that"


def test_where_a_row_costs_little_nearly_all_steps_have_both() -> None:
    _, mixed = run(Leeway(MOST), 4, 1000, lambda tokens: 0.02 + 0.0001 * tokens)
    assert mixed >= 960


def test_beside_prompts_there_are_a_quarter_as_many_tokens() -> None:
    leeway = Leeway(MOST)
    leeway.share = TENANTS_SHARE
    assert leeway.tokens([1, 1, 40], 512) == 10
    assert leeway.tokens([1, 400], 64) == 16


def test_short_prompts_add_up() -> None:
    leeway = Leeway(MOST)
    leeway.share = BATCH_SHARE
    assert sum(leeway.tokens([3], 512) for _ in range(1000)) in (299, 300)


def test_a_step_that_was_held_up_is_forgotten_soon() -> None:
    leeway = Leeway(MOST)
    leeway.share = TENANTS_SHARE
    run(leeway, 1, 10, lambda tokens: 0.01 + 0.001 * tokens)
    leeway.took(1, True, 100.0)
    _, mixed = run(leeway, 1, 200, lambda tokens: 0.01 + 0.001 * tokens)
    assert mixed >= 10
