"""Models to measure with: the demo model, or random weights in the shapes of a known one."""

import json
import math
from pathlib import Path
from typing import Any

from examples.demo import model_source
from stoker.runtime.publishing import push_model

SHARD_BYTES = 4 << 30

BASE = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "rms_norm_eps": 1e-5}
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
        "intermediate_size": 128, "vocab_size": 512, "rope_theta": 10000.0, "tie_word_embeddings": True,
        "max_position_embeddings": 2048,
    },
    "smollm2-135m": {
        "num_hidden_layers": 30, "hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3,
        "intermediate_size": 1536, "vocab_size": 49152, "rope_theta": 100000.0, "tie_word_embeddings": True,
        "max_position_embeddings": 8192,
    },
    "llama3-8b": {
        "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8,
        "intermediate_size": 14336, "vocab_size": 128256, "rope_theta": 500000.0, "tie_word_embeddings": False,
        "max_position_embeddings": 8192,
    },
}  # fmt: skip

TEMPLATE = "{% for message in messages %}{{ message['content'] }} {% endfor %}"


def tensor_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Hugging Face names and shapes in execution order."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    head = hidden // config["num_attention_heads"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        shapes |= {
            prefix + "input_layernorm.weight": (hidden,),
            prefix + "self_attn.q_proj.weight": (queries, hidden),
            prefix + "self_attn.k_proj.weight": (keys, hidden),
            prefix + "self_attn.v_proj.weight": (keys, hidden),
            prefix + "self_attn.o_proj.weight": (hidden, queries),
            prefix + "post_attention_layernorm.weight": (hidden,),
            prefix + "mlp.gate_proj.weight": (inner, hidden),
            prefix + "mlp.up_proj.weight": (inner, hidden),
            prefix + "mlp.down_proj.weight": (hidden, inner),
        }
    shapes["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    return shapes


def write_weights(config: dict[str, Any], folder: Path, seed: int = 0) -> None:
    """Random normal * 0.02 in bfloat16 (norms are ones), in shards of at most 4 GiB with an index."""
    import torch
    from safetensors.torch import save_file

    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(seed)
    shards: list[dict[str, Any]] = [{}]
    size = 0
    for name, shape in tensor_shapes(config).items():
        needed = 2 * math.prod(shape)
        if size and size + needed > SHARD_BYTES:
            shards.append({})
            size = 0
        size += needed
        random = torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)
        shards[-1][name] = (torch.ones_like(random) if len(shape) == 1 else random * 0.02).cpu()
    names = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    index = {tensor: file for file, shard in zip(names, shards, strict=True) for tensor in shard}
    for file, shard in zip(names, shards, strict=True):
        save_file(shard, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))


def write_tokenizer(vocabulary: int, folder: Path) -> None:
    """One word for every id: "w17" is token 17, so that any token ids can be sent and read as text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    words = {f"w{i}": i for i in range(vocabulary)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))


def random_model(shape: str, folder: Path, seed: int = 0) -> Path:
    """A Hugging Face folder with random weights, made once."""
    if (folder / "config.json").exists():
        return folder
    config = {**BASE, **SHAPES[shape], "torch_dtype": "bfloat16", "eos_token_id": None, "bos_token_id": None}
    folder.mkdir(parents=True, exist_ok=True)
    write_weights(config, folder, seed)
    write_tokenizer(config["vocab_size"], folder)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def published(model: str, data: Path) -> str:
    """Store URL of `model`: a shape's name, "smollm2" for the demo model, or a URL that is already published."""
    if "://" in model:
        return model
    target = data / "store" / "models" / model
    if not (target / "manifest.msgpack").exists():
        push_model(
            model_source() if model == "smollm2" else random_model(model, data / "random" / model), target.as_uri()
        )
    return target.as_uri()
