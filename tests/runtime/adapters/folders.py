"""LoRA adapters of random numbers as PEFT writes them, and base models with them merged in."""

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from stoker.runtime.adapters.adapter_file import AdapterFile
from stoker.runtime.adapters.peft import AdapterConfig, Sizes
from tests.runtime.engine.conftest import TinyModel

ALL = ("q", "k", "v", "o", "gate", "up", "down")
PARENTS = {**dict.fromkeys("qkvo", "self_attn"), **dict.fromkeys(("gate", "up", "down"), "mlp")}
Tensors = dict[str, torch.Tensor]


def config_of(modules: tuple[str, ...], rank: int, **fields: Any) -> dict[str, Any]:
    """As PEFT writes it, fields that don't matter here included."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "tiny",
        "r": rank,
        "lora_alpha": 2 * rank,
        "lora_dropout": 0.05,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "inference_mode": True,
        "layers_to_transform": None,
        "modules_to_save": None,
        "rank_pattern": {},
        "alpha_pattern": {},
        "target_modules": [f"{module}_proj" for module in modules],
        "use_dora": False,
        "use_rslora": False,
        **fields,
    }


def tensors_of(hf_config: dict[str, Any], modules: tuple[str, ...], rank: int, seed: int, size: float = 0.3) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    sizes = Sizes.from_hf(hf_config)
    made: Tensors = {}
    for layer in range(sizes.layers):
        for module in modules:
            depth, width = sizes.of(module)
            name = f"base_model.model.model.layers.{layer}.{PARENTS[module]}.{module}_proj.lora_"
            made[f"{name}A.weight"] = torch.randn(rank, depth, generator=generator) * size
            made[f"{name}B.weight"] = torch.randn(width, rank, generator=generator) * size
    return made


def folder_of(path: Path, config: dict[str, Any], tensors: Tensors) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, path / "adapter_model.safetensors")
    return path


def random_folder(
    path: Path, hf_config: dict[str, Any], seed: int, modules: tuple[str, ...] = ALL, rank: int = 8, **fields: Any
) -> Path:
    return folder_of(path, config_of(modules, rank, **fields), tensors_of(hf_config, modules, rank, seed))


def file_of(folder: Path) -> AdapterFile:
    """What a host agent tells the engine of a folder's adapter."""
    config, weights = (folder / "adapter_config.json").read_bytes(), folder / "adapter_model.safetensors"
    revision = hashlib.sha256(config + weights.read_bytes()).hexdigest()
    digest = hashlib.sha256(weights.read_bytes()).hexdigest()
    return AdapterFile(revision, str(weights), digest, AdapterConfig.read(config))


def merged(model: TinyModel, folder: Path) -> TinyModel:
    """W + scale * B A, as PEFT's merge_and_unload has it, by PEFT's definition of the scale."""
    from safetensors.torch import load_file

    config = json.loads((folder / "adapter_config.json").read_text())
    tensors, state = load_file(folder / "adapter_model.safetensors"), dict(model.state)
    scale = config["lora_alpha"] / (config["r"] ** 0.5 if config["use_rslora"] else config["r"])
    for name in [name for name in tensors if "lora_A" in name]:
        base = name.removeprefix("base_model.model.").replace(".lora_A.weight", ".weight")
        state[base] = state[base] + scale * tensors[name.replace("lora_A", "lora_B")] @ tensors[name]
    return TinyModel(model.hf_config, model.config, state)
