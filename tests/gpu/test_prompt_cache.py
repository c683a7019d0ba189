"""Blocks of the prompt cache that leave a GPU for a file and come back: the same bytes, the same tokens."""

from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from stoker.runtime.engine.request import GenerationRequest, SamplingParams
from tests.gpu.test_engine import engine
from tests.runtime.pool.test_prompt_exchange import Process

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

TIERS = [{}, {"host_cache_bytes": 16 << 20}]
SHARED = 20


def question(number: int, length: int = SHARED * 16 + 5) -> GenerationRequest:
    prompt = [(3 + 7 * i) % 4000 for i in range(length)] + [(number + 5 * i) % 4000 for i in range(30)]
    params = SamplingParams(24, temperature=0.0, ignore_eos=True)
    return GenerationRequest(str(number), prompt, params, cache_salt=b"ann")


def blocks_of(process: Process) -> dict[bytes, torch.Tensor]:
    """What is in the blocks that were of use, wherever they are."""
    engine, found = process.engine, {}
    for key in engine.scheduler.uses.counts:
        if entry := engine.pool.entries.get(key):
            found[key] = engine.runner.kv[entry.block].cpu()
        elif engine.scheduler.tier and (kept := engine.scheduler.tier.kept.get(key)):
            assert engine.copies is not None
            found[key] = engine.copies.host[kept.slot].clone()
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("before", TIERS, ids=["device", "host"])
@pytest.mark.parametrize("after", TIERS, ids=["to device", "to host"])
def test_what_comes_back_is_what_left(
    tmp_path: Path, before: dict[str, Any], after: dict[str, Any], dtype: str
) -> None:
    asleep = Process(engine("cuda", dtype=dtype, **before))
    first = {number: asleep.say(question(number)) for number in range(3)}
    assert [cached for _, cached in first.values()] == [0, SHARED * 16, SHARED * 16]
    assert asleep.export(tmp_path / "file", most=1 << 30) == (SHARED, "")
    woken = Process(engine("cuda", dtype=dtype, **after))
    assert woken.restore(tmp_path / "file") == (SHARED, "")
    answers = {number: woken.say(question(number)) for number in (1, 2)}
    assert [cached for _, cached in answers.values()] == [SHARED * 16, SHARED * 16]
    left, came = blocks_of(asleep), blocks_of(woken)
    assert left.keys() == came.keys() and all(left[key].equal(came[key]) for key in left)
    # Computed alike: the same cached blocks, the same steps behind them.
    assert {number: tokens for number, (tokens, _) in answers.items()} == {n: first[n][0] for n in (1, 2)}


def test_blocks_come_while_others_are_computed(tmp_path: Path) -> None:
    """On a stream of their own: no step reads a block before it is there, and none of theirs is written over."""
    asleep = Process(engine("cuda", num_blocks=200))
    first = {number: asleep.say(question(number)) for number in range(3)}
    asleep.export(tmp_path / "file", most=1 << 30)
    woken = Process(engine("cuda", num_blocks=200))
    others = [
        GenerationRequest(f"o{n}", [(n + 13 * i) % 4000 for i in range(90)], SamplingParams(60, 0.0)) for n in range(4)
    ]
    alone = {one.id: woken.engine.generate([one])[one.id] for one in others}
    woken.engine.pool.remove(range(1, 201))
    woken.engine.pool.add(range(1, 201))
    tokens: dict[str, list[int]] = {one.id: [] for one in others}
    for one in others:
        woken.engine.submit(one)
    for step in count():
        if step == 5:
            frame = {"t": "import prompts", "model": "m", "path": str(tmp_path / "file")}
            woken.exchange.handle("m", woken.engine, frame)
        for delta in woken.engine.step():
            tokens[delta.request_id] += delta.tokens
        if not woken.engine.has_work():
            break
    woken.exchange.wait_for("m")
    assert woken.answers.get_nowait()["blocks"] == SHARED
    assert tokens == alone
    assert woken.say(question(1)) == (first[1][0], SHARED * 16)
