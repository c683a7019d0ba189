import time

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ReadOnlyError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from stoker.queue.retry import full_jitter, insist


class Flaky:
    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)
        self.calls = 0

    async def __call__(self) -> str:
        self.calls += 1
        if self.errors:
            raise self.errors.pop(0)
        return "answer"


async def test_insists_while_the_server_is_away() -> None:
    call = Flaky(RedisConnectionError("gone"), RedisTimeoutError("slow"), ReadOnlyError("replica"))
    assert await insist(call, 5) == "answer"
    assert call.calls == 4


async def test_gives_up_at_the_deadline_with_the_last_error() -> None:
    began = time.monotonic()
    with pytest.raises(RedisConnectionError, match="gone"):
        await insist(Flaky(*[RedisConnectionError("gone")] * 1000), 0.2)
    assert time.monotonic() - began < 20, "a thousand repetitions take minutes"


async def test_other_errors_are_not_repeated() -> None:
    call = Flaky(ResponseError("ERR wrong"))
    with pytest.raises(ResponseError):
        await insist(call, 5)
    assert call.calls == 1


def test_full_jitter_is_spread_below_a_rising_ceiling() -> None:
    for attempt, ceiling in [(0, 0.02), (3, 0.16), (20, 1.0), (10_000, 1.0)]:
        draws = [full_jitter(attempt) for _ in range(500)]
        assert 0 <= min(draws) < 0.1 * ceiling
        assert 0.9 * ceiling < max(draws) <= ceiling
