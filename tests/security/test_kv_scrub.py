"""Row 4: a KV block that changes hands is never read before it is written. Poison mode: whatever nobody has written
since the block was handed out is NaN, so that one read of it would show in every answer after it."""

import math
from collections.abc import Iterator
from typing import Any

import pytest

from stoker.runtime.engine.blocks import BlockPool
from stoker.runtime.engine.engine import Engine
from stoker.runtime.engine.request import Delta, GenerationRequest, SamplingParams
from tests.runtime.engine.conftest import TinyModel


class PoisonedPool:
    """Wraps an engine's pool: blocks are poisoned at the moment they are handed out."""

    def __init__(self, engine: Engine) -> None:
        self.poisoned = 0
        self._cache, self._allocate = engine.runner.kv, engine.pool.allocate
        engine.pool.allocate = self.allocate  # type: ignore[method-assign]

    def allocate(self, count: int) -> list[int]:
        blocks = self._allocate(count)
        for block in blocks:
            self._cache[block] = math.nan
            self.poisoned += 1
        return blocks


def requests(tenant: bytes, first: int) -> Iterator[GenerationRequest]:
    """Prompts of 5 to 60 tokens, half of them with a prefix in common, greedy and sampled, with log-probabilities."""
    for number in range(8):
        length, start = 5 + 7 * number, 3 if number % 2 else first + 5 * number
        prompt = [(start + 11 * i) % 97 for i in range(length)]
        params = SamplingParams(12, temperature=number % 3 / 2, seed=number, ignore_eos=True, logprobs=3)
        yield GenerationRequest(f"{tenant.decode()}{number}", prompt, params, cache_salt=tenant)


def answers(engine: Engine, asked: list[GenerationRequest]) -> dict[str, list[Delta]]:
    said: dict[str, list[Delta]] = {}
    for request in asked:
        engine.submit(request)
    while engine.has_work():
        for delta in engine.step():
            said.setdefault(delta.request_id, []).append(delta)
    return said


@pytest.mark.parametrize(
    "options",
    [{}, {"num_blocks": 14}, {"token_budget": 16, "max_seqs": 16}, {"host_cache_bytes": 1 << 20}],
    ids=["roomy", "preempting", "chunked prefill", "host tier"],
)
def test_a_reused_block_is_never_read_before_it_is_written(options: dict[str, Any]) -> None:
    """First A's requests, then B's in A's blocks; B gets what it gets from an engine of its own."""
    model = TinyModel.random()
    shared, own = (model.engine(**{"num_blocks": 24, **options}) for _ in range(2))
    pool = PoisonedPool(shared)
    a, b = list(requests(b"ann", 10)), list(requests(b"bob", 10))
    for engine, order in ((shared, (a, b)), (own, (b,))):
        for asked in order:
            said = answers(engine, asked)
        if engine is shared:
            found = said
    assert pool.poisoned > shared.pool.total, "blocks were handed out more than once"
    assert all(delta.finish_reason != "error" for deltas in found.values() for delta in deltas)
    for name, deltas in found.items():
        assert [delta.tokens for delta in deltas] == [delta.tokens for delta in said[name]], name
        for ours, alone in zip(deltas, said[name], strict=True):
            for mine, theirs in zip(ours.logprobs, alone.logprobs, strict=True):
                assert mine.ids == theirs.ids and mine.logprob == pytest.approx(theirs.logprob, abs=1e-4)


def test_the_poison_would_be_noticed() -> None:
    """An engine that takes a block for cached that it never wrote answers with an error, or with something else."""
    model = TinyModel.random()
    engine = model.engine()
    (first, *_) = [request for request in requests(b"ann", 10) if len(request.prompt) > 40]
    clean = answers(engine, [first])
    engine.runner.kv[1 : BlockPool(64).total] = math.nan
    again = answers(engine, [GenerationRequest("again", first.prompt, first.params, cache_salt=b"ann")])
    assert [delta.tokens for delta in again["again"]] != [delta.tokens for delta in clean[first.id]]
