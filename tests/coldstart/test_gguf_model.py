"""The demo model, converted from GGUF, must be the model that transformers knows."""

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors import safe_open

from stoker.coldstart.failures import ManifestInvalid, UnsupportedModel
from stoker.coldstart.gguf_model import convert_gguf, halves_apart, header


def interleaved(rows: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's order, written row by row: pair member h of pair i of head k goes to row 2i + h of the head."""
    size = rows.shape[0] // heads
    result = np.empty_like(rows)
    for head in range(heads):
        for pair in range(size // 2):
            for half in range(2):
                result[head * size + 2 * pair + half] = rows[head * size + half * (size // 2) + pair]
    return result


def test_halves_apart_undoes_the_interleaving():
    rows = np.arange(3 * 8 * 5, dtype=np.float32).reshape(24, 5)
    assert np.array_equal(halves_apart(interleaved(rows, 3), 3), rows)


def test_header_is_aligned_and_contiguous():
    data = header({"a": [3], "b": [2, 2], "c": []})
    assert len(data) % 8 == 0
    table = json.loads(data[8:])
    assert [table[name]["data_offsets"] for name in "abc"] == [[0, 6], [6, 14], [14, 16]]


def test_refuses_what_is_not_gguf(tmp_path: Path):
    path = tmp_path / "model.gguf"
    path.write_bytes(b"not a model at all, but long enough to have a header")
    with pytest.raises(ManifestInvalid, match="not a GGUF file"):
        convert_gguf(path, tmp_path / "out")


def write_gguf(path: Path, architecture: str = "llama", pre: str = "smollm", tensor: str = "token_embd.weight") -> None:
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_uint32(f"{architecture}.embedding_length", 8)
    writer.add_uint32(f"{architecture}.block_count", 0)
    writer.add_uint32(f"{architecture}.context_length", 16)
    writer.add_uint32(f"{architecture}.feed_forward_length", 8)
    writer.add_uint32(f"{architecture}.attention.head_count", 2)
    writer.add_float32(f"{architecture}.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(["a", "b", "ab"])
    writer.add_token_types([1, 1, 1])
    writer.add_token_merges(["a b"])
    writer.add_tensor(tensor, np.ones((3, 8), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architecture": "falcon"}, "architecture falcon"),
        ({"pre": "llama-bpe"}, "pre-tokeniser llama-bpe"),
        ({"tensor": "blk.0.attn_qkv.weight"}, "attn_qkv"),
    ],
)
def test_refuses_other_models_by_name(tmp_path: Path, change: dict[str, str], message: str):
    write_gguf(tmp_path / "model.gguf", **change)
    with pytest.raises(UnsupportedModel, match=message):
        convert_gguf(tmp_path / "model.gguf", tmp_path / "out")


def test_converts_a_small_file(tmp_path: Path):
    write_gguf(tmp_path / "model.gguf")
    convert_gguf(tmp_path / "model.gguf", tmp_path / "out")
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        weight = file.get_tensor("model.embed_tokens.weight")
    assert weight.dtype == torch.bfloat16 and torch.equal(weight, torch.ones(3, 8, dtype=torch.bfloat16))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["tie_word_embeddings"] is True and config["rms_norm_eps"] == 1e-5


@pytest.mark.real_model
def test_smollm2_answers_paris(smollm2_dir: Path):
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(smollm2_dir)
    model = LlamaForCausalLM.from_pretrained(smollm2_dir, dtype=torch.float32)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**prompt, do_sample=False, max_new_tokens=16)
    answer = tokenizer.decode(output[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
    assert answer == "The capital of France is Paris."
    config = json.loads((smollm2_dir / "config.json").read_text())
    assert (config["num_hidden_layers"], config["rope_theta"], config["head_dim"]) == (30, 100000.0, 64)


@pytest.mark.real_model
def test_smollm2_tokenizer_splits_digits_and_round_trips(smollm2_dir: Path):
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(smollm2_dir / "tokenizer.json"))
    text = "  In 1969, naïve 猫 said: “Hello”\n\n\tdef f(x): return x**2  "
    encoding = tokenizer.encode(text)
    assert tokenizer.decode(encoding.ids) == text
    assert [token for token in encoding.tokens if token.isdigit()] == list("19692")
    assert tokenizer.encode("<|im_start|>user").ids[0] == 1
