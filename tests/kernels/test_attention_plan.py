import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.kernels.attention_plan import LEAST_TOKENS, MAX_SEGMENTS, plan
from stoker.kernels.tuning import Tile, Tiles

HEADS = st.sampled_from([(32, 8, 128), (9, 3, 64), (8, 2, 64), (4, 4, 64), (28, 4, 128), (71, 1, 64), (16, 16, 256)])


@given(st.integers(1, 20_000), st.integers(0, 600), st.integers(16, 200_000), HEADS, st.sampled_from([2, 4]))
def test_every_shape_has_a_valid_plan(tokens, sequences, context, heads, item_bytes):
    q_heads, kv_heads, dim = heads
    made = plan(tokens, sequences, context, q_heads, kv_heads, dim, item_bytes, 132)
    assert made.block_m // (q_heads // kv_heads) >= 1
    for size in (made.block_m, made.block_n, made.segments):
        assert size & (size - 1) == 0
    assert made.block_m >= 16 and made.block_n >= 16
    assert made.segments == 1 or context // made.segments >= LEAST_TOKENS


def segments(sequences: int, context: int) -> int:
    return plan(sequences, 0, context, 32, 8, 128, 2, 132).segments


def test_few_sequences_with_long_contexts_are_split():
    assert segments(1, 8192) == MAX_SEGMENTS
    assert segments(8, 8192) == 8
    assert segments(256, 8192) == segments(67, 8192) == 1
    assert segments(1, 128) == 1


def test_in_steps_of_many_sequences_only_longer_contexts_than_others_are_split():
    made = [plan(sequences, 0, 8192, 32, 8, 128, 2, 132) for sequences in (16, 32, 64)]
    assert [(p.segments, p.least * p.block_n) for p in made] == [(8, 256), (4, 512), (2, 1024)]


def test_measured_tiles_are_for_sixteen_bits():
    tiles = Tiles(Tile(16, 32, 4, 4), Tile(32, 64, 4, 3), Tile(128, 64, 8, 3, 128))
    made = [plan(tokens, tokens > 1, 8192, 32, 8, 128, 2, 132, tiles) for tokens in (1, 100, 1000)]
    assert [(p.block_m, p.block_n) for p in made] == [(16, 32), (32, 64), (128, 64)]
    assert [p.registers for p in made] == [0, 0, 128]
    assert plan(1000, 1, 8192, 32, 8, 128, 4, 132, tiles) == plan(1000, 1, 8192, 32, 8, 128, 4, 132)
    assert plan(1, 0, 8192, 71, 1, 64, 2, 132, tiles).block_m == 128, "every query head of a group fits"


def test_tall_tiles_only_where_every_processor_gets_one():
    heights = [plan(tokens, 1, 8192, 32, 8, 128, 2, 132).block_m for tokens in (512, 1024, 8192)]
    assert heights == [64, 128, 128]
    assert plan(512, 1, 8192, 32, 8, 128, 2, 64).block_m == 128, "on a smaller device"


def test_a_device_that_wants_fewer_programs_splits_less():
    tile = Tile(16, 64, 4, 3)
    made = [plan(4, 0, 8192, 32, 8, 128, 2, 132, Tiles(tile, tile, tile, split)).segments for split in (1, 2, 4)]
    assert made == [8, 8, 16]


def test_steps_with_prefill_are_never_split():
    assert [plan(tokens, 8, 8192, 32, 8, 128, 2, 132).segments for tokens in (8, 9)] == [1, 1]


@pytest.mark.parametrize(("q_heads", "kv_heads", "dim"), [(9, 2, 64), (8, 2, 96), (8, 2, 8)])
def test_unsupported_heads_are_refused(q_heads, kv_heads, dim):
    with pytest.raises(ValueError, match="multiple|power of two"):
        plan(1, 1, 16, q_heads, kv_heads, dim, 2, 132)
