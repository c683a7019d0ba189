import pytest

from stoker.runtime.client.errors import StokerError, Unreachable
from stoker.runtime.client.patience import LONGEST_PAUSE_S, LOST_S, Patience


def refused(status: int, retry_after_s: float | None = None, final: bool = False) -> StokerError:
    return StokerError(status, {"message": "no"}, retry_after_s=retry_after_s, final=final)


@pytest.mark.parametrize("status", [429, 503])
def test_the_gateways_own_time_is_kept_for_as_long_as_it_says_so(status: int) -> None:
    patience = Patience()
    pauses = [patience.pause(refused(status, 7.0), now) for now in range(0, 7000, 7)]
    assert all(7.0 <= pause <= 7.0 * 1.25 for pause in pauses) and len(set(pauses)) > 1


@pytest.mark.parametrize(
    "error",
    [refused(429, 7.0, final=True), refused(429), refused(404), refused(500), Unreachable("u", "w", final=True)],
)
def test_what_no_repetition_helps_is_raised(error: StokerError) -> None:
    with pytest.raises(StokerError) as caught:
        Patience().pause(error, 0.0)
    assert caught.value is error


@pytest.mark.parametrize("error", [Unreachable("u", "why"), refused(502), refused(504), refused(503)])
def test_a_lost_gateway_is_tried_for_a_while(error: StokerError) -> None:
    patience, now, pauses = Patience(), 0.0, []
    with pytest.raises(StokerError):
        while True:
            pauses.append(patience.pause(error, now))
            now += pauses[-1]
    assert LOST_S < now <= LOST_S + LONGEST_PAUSE_S
    assert pauses[0] <= 0.1 and max(pauses) > LONGEST_PAUSE_S / 2


def test_a_gateway_that_comes_back_gets_the_whole_time_again() -> None:
    patience = Patience()
    patience.pause(Unreachable("u", "w"), 0.0)
    patience.pause(refused(429, 1.0), LOST_S - 1)
    assert patience.pause(Unreachable("u", "w"), LOST_S + 1) <= 0.1
