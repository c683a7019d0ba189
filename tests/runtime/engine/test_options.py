from typing import TYPE_CHECKING, Any

import pytest
import torch

from stoker.runtime.engine.options import EngineOptions

if TYPE_CHECKING:
    from conftest import TinyModel


def test_defaults_follow_device_and_model(tiny: "TinyModel") -> None:
    options = EngineOptions().resolve(tiny.config)
    assert (options.dtype, options.token_budget, options.max_model_len) == ("float32", 512, 128)
    assert options.torch_dtype is torch.float32
    assert (options.async_scheduling, options.cuda_graphs) == ("off", False)
    on_gpu = EngineOptions(device="cuda").resolve(tiny.config)
    assert (on_gpu.dtype, on_gpu.token_budget) == ("bfloat16", 8192)
    assert (on_gpu.async_scheduling, on_gpu.cuda_graphs) == ("on", True)


def test_what_was_asked_for_stays(tiny: "TinyModel") -> None:
    options = EngineOptions(
        dtype="bfloat16", token_budget=64, max_model_len=32, max_seqs=8, async_scheduling="on", cuda_graphs=False
    )
    assert options.resolve(tiny.config) == options
    assert options.resolve(tiny.config).resolve(tiny.config) == options


def test_many_sequences_raise_the_default_budget(tiny: "TinyModel") -> None:
    assert EngineOptions(max_seqs=1000).resolve(tiny.config).token_budget == 1000


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"device": "tpu"}, "device must be one of cpu, cuda"),
        ({"dtype": "float16"}, "dtype must be"),
        ({"async_scheduling": "perhaps"}, "async_scheduling must be auto, on or off"),
        ({"max_seqs": 0}, "max_seqs must be 1 or more"),
        ({"token_budget": 8, "max_seqs": 9}, "token_budget 8 must be at least max_seqs 9"),
        ({"max_model_len": 129}, r"max_model_len must be 2 to 128 \(the model's\), not 129"),
        ({"max_model_len": 1}, "max_model_len must be 2 to 128"),
    ],
)
def test_what_cannot_work_is_refused(tiny: "TinyModel", values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EngineOptions.from_dict(values).resolve(tiny.config)


def test_unknown_options_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown engine option.*: max_tokens"):
        EngineOptions.from_dict({"max_tokens": 5})
