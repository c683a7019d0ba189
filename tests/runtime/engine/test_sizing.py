from typing import TYPE_CHECKING, Any

import pytest

from stoker.runtime.engine.options import EngineOptions
from stoker.runtime.engine.sizing import NotEnoughMemory, activation_bytes, block_bytes, free_bytes, kv_size

if TYPE_CHECKING:
    from conftest import TinyModel

BLOCK = 2 * 2 * 16 * 2 * 8 * 4
"""Layers x keys and values x tokens x KV heads x head dimension x bytes of a float32."""


def options(tiny: "TinyModel", **values: Any) -> EngineOptions:
    return EngineOptions(**{"max_seqs": 4, **values}).resolve(tiny.config)


def test_bytes_of_a_block(tiny: "TinyModel") -> None:
    assert block_bytes(tiny.config, options(tiny)) == BLOCK
    assert block_bytes(tiny.config, options(tiny, dtype="bfloat16")) == BLOCK // 2


def test_blocks_that_were_asked_for(tiny: "TinyModel") -> None:
    size = kv_size(tiny.config, options(tiny, num_blocks=10), free_bytes=0)
    assert (size.num_blocks, size.total_bytes) == (10, 11 * BLOCK)


def test_bytes_that_were_granted_include_the_null_block(tiny: "TinyModel") -> None:
    size = kv_size(tiny.config, options(tiny, kv_bytes=20 * BLOCK + 1), free_bytes=0)
    assert (size.num_blocks, size.total_bytes) == (19, 20 * BLOCK)


def test_free_memory_is_shared_and_leaves_room_for_a_step(tiny: "TinyModel") -> None:
    wanted = options(tiny)
    reserve = activation_bytes(tiny.config, wanted, wanted.token_budget, wanted.max_seqs)
    size = kv_size(tiny.config, wanted, free_bytes=4 * (reserve + 20 * BLOCK))
    assert size.num_blocks == 19


def test_no_more_than_all_sequences_could_use(tiny: "TinyModel") -> None:
    assert kv_size(tiny.config, options(tiny), free_bytes=1 << 40).num_blocks == 4 * 128 // 16


def test_a_shortfall_is_named_to_the_byte_and_the_advice_works(tiny: "TinyModel") -> None:
    with pytest.raises(NotEnoughMemory) as caught:
        kv_size(tiny.config, options(tiny, kv_bytes=4 * BLOCK), free_bytes=0)
    message = str(caught.value)
    assert "3 blocks holds 48 tokens, but one sequence may have 128: short of" in message
    assert f"short of {5 * BLOCK} bytes" in message
    assert f"kv_bytes to {9 * BLOCK} or more, or max_model_len to 48" in message
    assert kv_size(tiny.config, options(tiny, kv_bytes=9 * BLOCK), 0).num_blocks == 8
    assert kv_size(tiny.config, options(tiny, kv_bytes=4 * BLOCK, max_model_len=48), 0).num_blocks == 3


def test_free_memory_of_this_machine() -> None:
    assert free_bytes("cpu") > 1 << 20
