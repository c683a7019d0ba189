from array import array

import numpy as np
import torch

from stoker.runtime.engine.batch import host_batch, prepare
from stoker.runtime.engine.request import GenerationRequest, SamplingParams
from stoker.runtime.engine.scheduler import Work
from stoker.runtime.engine.sequence import Sequence, blocks_for


def sequence(tokens: list[int], first_block: int, params: SamplingParams) -> Sequence:
    made = Sequence.of(GenerationRequest("", tokens, params), 0, b"", ())
    made.blocks = array("i", range(first_block, first_block + blocks_for(len(tokens))))
    return made


def mixed_work() -> list[Work]:
    """A middle chunk, a decode step, a last chunk and a whole prompt."""
    rng = np.random.default_rng(3)
    shapes = [(100, 7, 50), (40, 39, 1), (64, 17, 47), (5, 0, 5)]
    work: list[Work] = []
    for i, (length, start, count) in enumerate(shapes):
        params = SamplingParams(10, 0.5 + i, 0.9 - i / 10, i, i / 10, seed=-i)
        one = sequence(rng.integers(0, 1000, length).tolist(), 1 + 10 * i, params)
        work.append(Work(one, start, count, start + count == length))
    return work


def test_every_token_is_where_a_slow_loop_puts_it() -> None:
    work, batch = mixed_work(), host_batch(mixed_work())
    ids, positions, slots, owners = [], [], [], []
    for owner, item in enumerate(work):
        for position in range(item.start, item.start + item.count):
            ids.append(item.sequence.tokens[position])
            positions.append(position)
            slots.append(item.sequence.blocks[position // 16] * 16 + position % 16)
            owners.append(owner)
    assert (batch.ids.tolist(), batch.positions.tolist(), batch.slots.tolist()) == (ids, positions, slots)
    assert batch.query_start.tolist() == [0, *np.bincount(owners).cumsum()]
    assert batch.context_len.tolist() == [57, 40, 64, 5]
    assert [owners[row] for row in batch.last] == [0, 1, 2, 3]
    assert [positions[row] for row in batch.last] == [56, 39, 63, 4]
    for row, item in zip(batch.block_table, work, strict=True):
        assert row.tolist() == [*item.sequence.blocks, *[0] * (7 - len(item.sequence.blocks))]


def test_sampling_rows_are_those_of_sequences_that_sample() -> None:
    batch = host_batch(mixed_work())
    assert batch.sampled.tolist() == [1, 2, 3]
    assert batch.position.tolist() == [40, 64, 5]
    assert batch.temperature.tolist() == [1.5, 2.5, 3.5]
    assert batch.top_k.tolist() == [1, 2, 3]
    assert batch.seed.tolist() == [-1, -2, -3]
    assert np.allclose(batch.top_p, [0.8, 0.7, 0.6])
    assert np.allclose(batch.min_p, [0.1, 0.2, 0.3])


def test_the_device_gets_the_same_values_with_the_kernels_dtypes() -> None:
    host, batch = host_batch(mixed_work()), prepare(mixed_work(), "cpu")
    int32 = {"block_table", "query_start", "context_len", "top_k"}
    float32 = {"temperature", "top_p", "min_p"}
    for name in type(batch).__slots__:
        tensor = getattr(batch, name)
        assert np.array_equal(tensor.numpy(), getattr(host, name)), name
        expected = torch.int32 if name in int32 else torch.float32 if name in float32 else torch.int64
        assert tensor.dtype is expected, name
        assert tensor.data_ptr() % 16 == 0 and tensor.is_contiguous(), name


def test_a_step_in_which_nobody_samples() -> None:
    batch = prepare(mixed_work()[:1], "cpu")
    assert batch.sampled.shape == batch.temperature.shape == (0,)
