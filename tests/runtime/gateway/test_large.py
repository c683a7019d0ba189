"""Large results: the same bytes, and others are answered meanwhile."""

import asyncio
import base64
import gc
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.runtime.arrays import to_ext
from stoker.runtime.gateway import large
from stoker.runtime.gateway.large import LARGE, THREES, base64_of, json_by_pieces, list_of
from stoker.runtime.gateway.media import shown, value_in
from stoker.runtime.gateway.sse import json_bytes

MOST_SHARE, ROUNDS = 0.25, 5
SCALARS = st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats() | st.text() | st.binary()
VALUES = st.recursive(
    SCALARS, lambda part: st.lists(part, max_size=40) | st.dictionaries(st.text() | st.integers(), part)
)


@given(VALUES)
def test_pieces_make_the_same_json(value: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(large, "TEXT", 3)
        patch.setattr(large, "MANY", 4)
        patch.setattr(large, "SHORT", 2)
        assert json_by_pieces(value) == json_bytes(value)


@pytest.mark.parametrize(
    "value",
    ['é"\n' * 1_000_000, [0.5, float("nan")] * 5_000, [[1, 2.0, None]] * 5_000, {"a": {"b": ["x" * 2_000] * 3_000}}],
)
def test_large_values_make_the_same_json(value: Any) -> None:
    assert json_by_pieces(value) == json_bytes(value)


def test_bytes_and_arrays_by_pieces() -> None:
    for size in (0, 1, THREES - 1, THREES, 2 * THREES + 5):
        data = bytes(range(256)) * (size // 256 + 1)
        assert base64_of(data[:size]) == base64.b64encode(data[:size]).decode()
    for shape in ((), (0,), (700_000,), (3, 300_000), (300_000, 3), (0, 4)):
        array = np.arange(int(np.prod(shape)), dtype=np.float32).reshape(shape)
        assert list_of(array) == array.tolist()


@pytest.fixture
def frozen() -> Iterator[None]:
    """As the gateway does at its start: what other tests left is not looked through in the middle of an answer."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


async def longest_share(value: Any) -> float:
    """For which part of its making an answer kept others waiting at a stretch. What counts is the time of this process,
    which stands still while the machine is busy with others."""
    gaps: list[float] = []

    async def tick() -> None:
        while True:
            before = time.process_time()
            await asyncio.sleep(0.001)
            gaps.append(time.process_time() - before)

    ticking, began = asyncio.create_task(tick()), time.process_time()
    response = await value_in({}, value, LARGE)
    took = time.process_time() - began
    ticking.cancel()
    assert bytes(response.body) == json_bytes(shown(value)) and response.media_type == "application/json"
    return max(gaps, default=took) / took


@pytest.mark.usefixtures("frozen")
@pytest.mark.parametrize("kind", ["bytes", "array", "list"])
async def test_others_are_answered_while_a_large_result_is_shown(kind: str) -> None:
    values = {"bytes": bytes(60_000_000), "array": to_ext(np.random.rand(1_000_000)), "list": [[0.5, 1]] * 150_000}
    shares: list[float] = []
    while min([1.0, *shares]) >= MOST_SHARE:
        assert len(shares) < ROUNDS, shares
        shares.append(await longest_share(values[kind]))
