"""Turns a GGUF file of the Llama architecture into a Hugging Face folder with bfloat16 weights.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. llama.cpp stores the rows of the query and key
projections so that rotary pairs are neighbours; Hugging Face keeps the two halves of a head apart.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from stoker.coldstart.failures import ManifestInvalid, UnsupportedModel
from stoker.coldstart.gguf_tokenizer import tokenizer_documents
from stoker.coldstart.repository import CONFIG, SINGLE

BLOCK_ROWS = 4096

Metadata = dict[str, Any]

GLOBAL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER_NAMES = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}


def convert_gguf(path: Path, out: Path) -> None:
    """Writes model.safetensors, config.json, generation_config.json, tokenizer.json and tokenizer_config.json.

    Holds a few thousand dequantised rows at a time. Raises UnsupportedModel for another architecture, tokenizer or rope
    scaling, ManifestInvalid for a file that isn't GGUF.
    """
    try:
        reader = gguf.GGUFReader(path)
    except (ValueError, OSError, IndexError) as error:
        raise ManifestInvalid(str(path), None, f"not a GGUF file ({error})") from error
    metadata = {name: field.contents() for name, field in reader.fields.items()}
    tensors = {hf_name(path, tensor.name): tensor for tensor in reader.tensors}
    config = model_config(path, metadata, tied="lm_head.weight" not in tensors)
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / CONFIG, config)
    write_json(out / "generation_config.json", {name: config[name] for name in token_ids(metadata)})
    for name, document in tokenizer_documents(path, metadata).items():
        (out / name).write_text(document, encoding="utf-8")
    write_safetensors(out / SINGLE, tensors, config)


def hf_name(path: Path, name: str) -> str:
    if name in GLOBAL_NAMES:
        return GLOBAL_NAMES[name]
    block, _, rest = name.partition(".")
    number, _, part = rest.partition(".")
    if block != "blk" or part not in LAYER_NAMES:
        raise UnsupportedModel(str(path), None, f"tensor {name} has no place in a Llama model")
    return f"model.layers.{number}.{LAYER_NAMES[part]}"


def model_config(path: Path, metadata: Metadata, *, tied: bool) -> dict[str, Any]:
    architecture = metadata["general.architecture"]
    scaling = metadata.get("llama.rope.scaling.type", "none")
    if architecture != "llama" or scaling != "none":
        raise UnsupportedModel(str(path), None, f"architecture {architecture} with rope scaling {scaling}")
    heads, hidden = metadata["llama.attention.head_count"], metadata["llama.embedding_length"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "vocab_size": len(metadata["tokenizer.ggml.tokens"]),
        "hidden_size": hidden,
        "intermediate_size": metadata["llama.feed_forward_length"],
        "num_hidden_layers": metadata["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.get("llama.attention.head_count_kv", heads),
        "head_dim": metadata.get("llama.rope.dimension_count", hidden // heads),
        "hidden_act": "silu",
        "max_position_embeddings": metadata["llama.context_length"],
        "rms_norm_eps": shortest(metadata["llama.attention.layer_norm_rms_epsilon"]),
        "rope_theta": shortest(metadata.get("llama.rope.freq_base", 10_000.0)),
        "tie_word_embeddings": tied,
        "attention_bias": False,
        "mlp_bias": False,
        **token_ids(metadata),
    }


def token_ids(metadata: Metadata) -> dict[str, int]:
    names = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    keys = {name: f"tokenizer.ggml.{part}_token_id" for name, part in names.items()}
    return {name: metadata[key] for name, key in keys.items() if key in metadata}


def shortest(value: float) -> float:
    """The decimal number that was meant: GGUF stores 1e-5 as the float32 9.9999997e-06."""
    return float(str(np.float32(value)))


def write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2), encoding="utf-8")


def write_safetensors(path: Path, tensors: dict[str, gguf.ReaderTensor], config: dict[str, Any]) -> None:
    """The file appears when it is complete."""
    names = sorted(tensors)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(temporary, "wb") as file:
            file.write(header({name: hf_shape(tensors[name]) for name in names}))
            for name in names:
                file.writelines(bfloat16_blocks(name, tensors[name], config))
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def header(shapes: dict[str, list[int]]) -> bytes:
    """Eight bytes of length and the JSON table, padded so that the data starts on a multiple of eight."""
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    for name, (begin, end) in zip(shapes, offsets(shapes), strict=True):
        table[name] = {"dtype": "BF16", "shape": shapes[name], "data_offsets": [begin, end]}
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def offsets(shapes: dict[str, list[int]]) -> Iterator[tuple[int, int]]:
    position = 0
    for shape in shapes.values():
        start, position = position, position + 2 * int(np.prod(shape))
        yield start, position


def hf_shape(tensor: gguf.ReaderTensor) -> list[int]:
    """GGUF lists the fastest dimension first."""
    return [int(size) for size in reversed(tensor.shape)]


def bfloat16_blocks(name: str, tensor: gguf.ReaderTensor, config: dict[str, Any]) -> Iterator[bytes]:
    """The tensor's bytes in order, a bounded number of rows at a time except where heads have to be regrouped."""
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    regrouped = [count for projection, count in heads.items() if f".{projection}." in name]
    rows = len(tensor.data) if regrouped else BLOCK_ROWS
    for start in range(0, len(tensor.data), rows):
        values = gguf.dequantize(tensor.data[start : start + rows], tensor.tensor_type)
        for count in regrouped:
            values = halves_apart(values, count)
        yield gguf.quantize(values, gguf.GGMLQuantizationType.BF16).tobytes()


def halves_apart(rows: np.ndarray, heads: int) -> np.ndarray:
    """[heads * D, H] with rotary pairs as neighbouring rows -> the same with pair members D/2 rows apart."""
    pairs = rows.reshape(heads, rows.shape[0] // heads // 2, 2, *rows.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows.shape)
