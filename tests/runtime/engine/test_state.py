from array import array

import torch

from stoker.runtime.engine.batch import Bucket, mark_sent, pack
from stoker.runtime.engine.request import GenerationRequest, SamplingParams
from stoker.runtime.engine.scheduler import Work
from stoker.runtime.engine.sequence import Sequence, blocks_for
from stoker.runtime.engine.state import Batch, Table

WIDTH = 8


def sequence(length: int, row: int) -> Sequence:
    params = SamplingParams(10, 0.5 + row, 0.9 - row / 10, row, row / 10, seed=-row)
    made = Sequence.of(GenerationRequest("", [100 * row + i for i in range(length)], params), 0, b"", ())
    made.blocks = array("i", [7 * row + i + 1 for i in range(blocks_for(length))])
    made.row = row
    return made


def mixed_work() -> list[Work]:
    """A middle chunk, a decode step, a last chunk and a whole prompt, in rows out of order."""
    shapes = [(100, 7, 50, 5), (40, 39, 1, 0), (64, 17, 47, 3), (5, 0, 5, 1)]
    return [Work(sequence(length, row), start, count, True) for length, start, count, row in shapes]


def table() -> Table:
    return Table(6, WIDTH, Bucket(6, 128), "cpu")


def received(one: Table, work: list[Work], bucket: Bucket) -> Batch:
    one.receive(pack(work, bucket, one.padding_row, one.width, one.next_buffer()))
    mark_sent(work)
    return one.batch(bucket)


def test_every_token_is_where_a_slow_loop_puts_it() -> None:
    work = mixed_work()
    batch = received(table(), work, Bucket(4, 103))
    ids, positions, slots, owners = [], [], [], []
    for owner, item in enumerate(work):
        for position in range(item.start, item.start + item.count):
            ids.append(item.sequence.tokens[position])
            positions.append(position)
            slots.append(item.sequence.blocks[position // 16] * 16 + position % 16)
            owners.append(owner)
    assert (batch.ids.tolist(), batch.positions.tolist(), batch.slots.tolist()) == (ids, positions, slots)
    assert batch.query_start.tolist() == [0, 50, 51, 98, 103]
    assert batch.context_len.tolist() == batch.position.tolist() == [57, 40, 64, 5]
    assert batch.last.tolist() == [49, 50, 97, 102]
    assert batch.rows.tolist() == [5, 0, 3, 1]
    for row, item in zip(batch.block_table, work, strict=True):
        assert row[: len(item.sequence.blocks)].tolist() == item.sequence.blocks.tolist()


def test_parameters_follow_their_rows() -> None:
    batch = received(table(), mixed_work(), Bucket(4, 103))
    assert batch.temperature.tolist() == [5.5, 0.5, 3.5, 1.5]
    assert batch.top_k.tolist() == [5, 0, 3, 1]
    assert batch.seed.tolist() == [-5, 0, -3, -1]
    torch.testing.assert_close(batch.top_p, torch.tensor([0.4, 0.9, 0.6, 0.8]))
    torch.testing.assert_close(batch.min_p, torch.tensor([0.5, 0.0, 0.3, 0.1]))


def test_tensors_have_the_kernels_dtypes_and_alignment() -> None:
    batch = received(table(), mixed_work(), Bucket(6, 128))
    int32 = {"block_table", "query_start", "context_len", "top_k"}
    float32 = {"temperature", "top_p", "min_p"}
    for name in Batch.__slots__:
        tensor = getattr(batch, name)
        expected = torch.int32 if name in int32 else torch.float32 if name in float32 else torch.int64
        assert tensor.dtype is expected, name
        assert tensor.data_ptr() % 16 == 0 and tensor.is_contiguous(), name


def test_padding_stores_nothing_sees_nothing_and_belongs_to_nobody() -> None:
    one, work = table(), mixed_work()
    exact, padded = received(table(), mixed_work(), Bucket(4, 103)), received(one, work, Bucket(6, 128))
    for name in Batch.__slots__:
        real = getattr(padded, name)[: len(getattr(exact, name))]
        assert real.equal(getattr(exact, name)), name
    assert padded.slots[103:].tolist() == [-1] * 25
    assert padded.ids[103:].tolist() == padded.positions[103:].tolist() == [0] * 25
    assert padded.context_len[4:].tolist() == [0, 0]
    assert padded.query_start[5:].tolist() == [103, 103]
    assert padded.rows[4:].tolist() == [one.padding_row] * 2
    assert not padded.block_table[4:].any() and not padded.temperature[4:].any()


def test_nothing_but_padding() -> None:
    batch = received(table(), [], Bucket(2, 3))
    assert batch.slots.tolist() == [-1] * 3
    assert (batch.last.tolist(), batch.context_len.tolist()) == ([0, 0], [0, 0])


def test_sampled_tokens_are_the_next_steps_input() -> None:
    one, work = table(), mixed_work()
    one.keep(received(one, work, Bucket(6, 128)), torch.tensor([11, 12, 13, -1, 98, 99]))
    following = [Work(item.sequence, len(item.sequence.tokens), 1, True) for item in work]
    for item in following:
        item.sequence.blocks = array("i", range(50, 50 + blocks_for(item.start + 1)))
    batch = received(one, following, Bucket(4, 4))
    assert batch.ids.tolist() == [11, 12, 13, 0], "none (-1) is never computed with"
    assert batch.context_len.tolist() == [101, 41, 65, 6]


def test_a_row_learns_new_blocks_as_they_come() -> None:
    one = table()
    (item, *_) = mixed_work()
    received(one, [item], Bucket(1, 50))
    item.sequence.blocks.append(77)
    batch = received(one, [Work(item.sequence, 57, 43, True)], Bucket(1, 43))
    assert batch.block_table[0].tolist() == item.sequence.blocks.tolist()
