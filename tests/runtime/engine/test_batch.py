from array import array

import numpy as np

from stoker.runtime.engine.batch import (
    ADAPTER_WORD,
    FROM_TABLE,
    PARAM_WORDS,
    Bucket,
    Upload,
    layout,
    mark_sent,
    pack,
    param_words,
    upload_words,
)
from stoker.runtime.engine.request import GenerationRequest, SamplingParams
from stoker.runtime.engine.scheduler import Work
from stoker.runtime.engine.sequence import Sequence, blocks_for

WIDTH, PADDING_ROW = 10, 16
LARGEST = Bucket(8, 300)


def sequence(tokens: list[int], row: int, params: SamplingParams | None = None) -> Sequence:
    made = Sequence.of(GenerationRequest("", tokens, params or SamplingParams(10)), 0, b"", ())
    made.blocks = array("i", range(1 + 10 * row, 1 + 10 * row + blocks_for(len(tokens))))
    made.row = row
    return made


def mixed_work() -> list[Work]:
    """A middle chunk, a decode step, a last chunk and a whole prompt."""
    rng = np.random.default_rng(3)
    shapes = [(100, 7, 50), (40, 39, 1), (64, 17, 47), (5, 0, 5)]
    work: list[Work] = []
    for i, (length, start, count) in enumerate(shapes):
        params = SamplingParams(10, 0.5 + i, 0.9 - i / 10, i, i / 10, seed=-i)
        one = sequence(rng.integers(0, 1000, length).tolist(), 2 * i, params)
        work.append(Work(one, start, count, start + count == length))
    return work


def packed(work: list[Work], bucket: Bucket) -> Upload:
    buffer = np.full(upload_words(LARGEST, WIDTH), 77, np.int32)
    return pack(work, bucket, PADDING_ROW, WIDTH, buffer)


def test_sequences_and_tokens_stand_in_their_segments_and_padding_has_no_tokens() -> None:
    work, bucket = mixed_work(), Bucket(6, 128)
    words, where = packed(work, bucket).words, layout(bucket)
    assert words[where.rows.slice].tolist() == [0, 2, 4, 6, PADDING_ROW, PADDING_ROW]
    assert words[where.starts.slice].tolist() == [7, 39, 17, 0, 0, 0]
    assert words[where.query_start.slice].tolist() == [0, 50, 51, 98, 103, 103, 103]
    tokens = [token for item in work for token in item.sequence.tokens[item.start : item.start + item.count]]
    assert words[where.ids.slice].tolist() == tokens + [0] * 25
    assert all(segment.start % 4 == 0 for segment in where)


def test_a_token_that_only_the_device_knows_is_marked() -> None:
    one = sequence([4, 5, 6], row=0)
    bucket = Bucket(2, 4)
    words = packed([Work(one, 2, 2, True), Work(one, 3, 1, True)], bucket).words
    assert words[layout(bucket).ids.slice].tolist() == [6, FROM_TABLE, FROM_TABLE, 0]


def test_a_new_row_gets_its_blocks_and_parameters_and_later_only_what_changed() -> None:
    work = mixed_work()
    upload = packed(work, Bucket(4, 103))
    cells = upload.words[upload.tail.cells.slice].view(np.int64).tolist()
    blocks = upload.words[upload.tail.blocks.slice].tolist()
    expected = {item.sequence.row * WIDTH + i: block for item in work for i, block in enumerate(item.sequence.blocks)}
    assert dict(zip(cells, blocks, strict=True)) == expected
    assert upload.words[upload.tail.rows.slice].view(np.int64).tolist() == [0, 2, 4, 6]
    params = upload.words[upload.tail.params.slice].reshape(-1, PARAM_WORDS)
    assert np.array_equal(params, [param_words(item.sequence.params, 0) for item in work])
    mark_sent(work)
    work[1].sequence.blocks.append(99)
    upload = packed(work, Bucket(4, 103))
    assert upload.words[upload.tail.cells.slice].view(np.int64).tolist() == [2 * WIDTH + 3]
    assert upload.words[upload.tail.blocks.slice].tolist() == [99]
    assert upload.tail.rows.start == upload.tail.rows.stop == upload.tail.params.stop == len(upload.words)


def test_parameters_keep_their_bits() -> None:
    words = param_words(SamplingParams(1, temperature=0.7, top_p=0.9, top_k=2**31 - 1, min_p=0.1, seed=-(2**63)), 9)
    assert words[ADAPTER_WORD] == 9
    assert words.view(np.float32)[:3].tolist() == np.array([0.7, 0.9, 0.1], np.float32).tolist()
    assert (words[3], words.view(np.int64)[2]) == (2**31 - 1, -(2**63))


def test_the_largest_upload_fits() -> None:
    full = [sequence([1] * 16 * WIDTH, row=i) for i in range(LARGEST.sequences)]
    work = [Work(one, 0, 37, False) for one in full]
    assert len(packed(work, LARGEST).words) <= upload_words(LARGEST, WIDTH)
