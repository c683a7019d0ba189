import pytest
import torch

from stoker.runtime.engine.config import RopeConfig
from stoker.runtime.engine.rope import cos_sin, frequencies

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}


@pytest.mark.parametrize(
    "parameters",
    [
        {"rope_type": "default", "rope_theta": 10000.0},
        {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
        LLAMA3,
    ],
)
def test_tables_equal_those_of_transformers(parameters: dict[str, float]) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    theirs = LlamaRotaryEmbedding(LlamaConfig(head_dim=64, max_position_embeddings=4096, rope_parameters=parameters))
    cos, sin = theirs(torch.empty(0), torch.arange(4096)[None])
    rope = RopeConfig.from_hf({"rope_parameters": parameters, "max_position_embeddings": 4096})
    ours_cos, ours_sin = cos_sin(rope, 64, 4096, "cpu").chunk(2, dim=-1)
    torch.testing.assert_close(ours_cos, cos[0, :, :32], atol=2e-4, rtol=0)
    torch.testing.assert_close(ours_sin, sin[0, :, :32], atol=2e-4, rtol=0)
    torch.testing.assert_close(frequencies(rope, 64), theirs.inv_freq)


def test_a_table_is_as_long_as_the_context() -> None:
    table = cos_sin(RopeConfig(), 8, 10, "cpu")
    assert (table.shape, table.dtype) == ((10, 8), torch.float32)
    assert table[0].tolist() == [1, 1, 1, 1, 0, 0, 0, 0]
