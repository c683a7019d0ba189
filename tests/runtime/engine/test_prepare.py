"""The Triton version of `state.derive` equals the torch one. Triton's interpreter must be chosen before Triton is
imported, so this file runs itself in a process of its own."""

import os
import random
import subprocess
import sys
from array import array

import torch

from stoker.runtime.engine.batch import Bucket, layout, mark_sent, pack
from stoker.runtime.engine.request import GenerationRequest, SamplingParams
from stoker.runtime.engine.scheduler import Work
from stoker.runtime.engine.sequence import Sequence, blocks_for
from stoker.runtime.engine.state import Batch, Table, derive


def random_work(rng: random.Random, rows: int, width: int, sequences: int) -> list[Work]:
    work: list[Work] = []
    for row in rng.sample(range(rows), sequences):
        start = rng.randrange(16 * width - 1)
        count = rng.choice([1, 1, rng.randint(1, 16 * width - start)])
        params = SamplingParams(1, rng.random(), rng.random(), rng.randrange(2**31), rng.random(), rng.getrandbits(62))
        known = start + count - (count == 1 and rng.random() < 0.7)
        tokens = [rng.randrange(128_000) for _ in range(max(1, known))]
        one = Sequence.of(GenerationRequest("", tokens, params), 0, b"", ())
        one.row, one.blocks = row, array("i", rng.sample(range(1, 10_000), blocks_for(start + count)))
        work.append(Work(one, start, count, True))
    return work


def check(device: str) -> None:
    from stoker.runtime.engine.prepare import derive as in_triton
    from stoker.runtime.engine.prepare import fetch

    words = torch.arange(3001, dtype=torch.int32, pin_memory=device == "cuda")
    target = torch.full((4000,), -1, dtype=torch.int32, device=device)
    fetch(target, words)
    assert target[:3001].cpu().equal(words) and (target[3001:] == -1).all()
    rng = random.Random(5)
    for width in (5, 100):
        table = Table(12, width, Bucket(12, 20_000), device)
        for _ in range(6):
            work = random_work(rng, 12, width, rng.randint(0, 6))
            tokens = sum(item.count for item in work) + rng.randrange(3)
            bucket = Bucket(len(work) + 1 + rng.randrange(2), max(1, tokens))
            table.receive(pack(work, bucket, table.padding_row, width, table.next_buffer()))
            mark_sent(work)
            table.last_token.copy_(torch.tensor([rng.randrange(-1, 128_000) for _ in range(13)]))
            given = [table.words[segment.slice] for segment in layout(bucket)]
            ours, expected = in_triton(table, *given), derive(table, *given)
            for name in Batch.__slots__:
                one, other = getattr(ours, name), getattr(expected, name)
                assert one.dtype == other.dtype and one.equal(other), (name, one, other)


def test_triton_equals_torch() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, __file__], check=True, timeout=150, env=environment)


if __name__ == "__main__":
    check(sys.argv[1] if len(sys.argv) > 1 else "cpu")
