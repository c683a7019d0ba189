"""Which adapters are taken, and what is said of the others."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from stoker.coldstart.failures import ColdStartError, ManifestInvalid, UnsupportedModel
from stoker.coldstart.manifest import read_manifest
from stoker.coldstart.store import open_store
from stoker.runtime.adapters.peft import AdapterConfig, Sizes, check_tensors, piece_of
from stoker.runtime.adapters.published import AdapterRefused, check_adapters, read_adapter
from stoker.runtime.publishing import push_model
from stoker.runtime.spec import InvalidSpec
from tests.runtime.adapters.folders import ALL, config_of, folder_of, random_folder, tensors_of
from tests.runtime.engine.conftest import TINY

PREFIX = "base_model.model.model.layers.0."


def read(**fields: Any) -> AdapterConfig:
    return AdapterConfig.read(json.dumps({**config_of(ALL, 8), **fields}).encode())


@pytest.mark.parametrize(
    ("fields", "scale"),
    [
        ({}, 2.0),
        ({"lora_alpha": 4}, 0.5),
        ({"use_rslora": True, "r": 16, "lora_alpha": 4}, 1.0),
        ({"lora_alpha": 0}, 0),
    ],
)
def test_the_scale(fields: dict[str, Any], scale: float) -> None:
    assert read(**fields).scale == scale


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"peft_type": "LOHA"}, "peft_type must be 'LORA'"),
        ({"use_dora": True}, "use_dora True can't be served"),
        ({"bias": "all"}, "bias 'all'"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"rank_pattern": {"q_proj": 4}}, "rank_pattern"),
        ({"alpha_pattern": {"q_proj": 4}}, "alpha_pattern"),
        ({"init_lora_weights": "pissa_niter_16"}, "changes the base model"),
        ({"target_modules": ["q_proj", "embed_tokens"]}, "embed_tokens can't be served; q_proj, k_proj"),
        ({"target_modules": ["self_attn.q_proj", "lm_head"]}, "target_modules lm_head"),
        ({"r": 65}, "r must be 1 to 64, not 65"),
        ({"r": 0}, "r must be 1 to 64, not 0"),
        ({"r": True}, "r must be 1 to 64"),
        ({"lora_alpha": "16"}, "lora_alpha must be a number"),
        ({"lora_alpha": float("nan")}, "lora_alpha must be a number"),
    ],
)
def test_what_cant_be_served_is_named(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnsupportedModel, match="adapter_config.json") as refused:
        read(**fields)
    assert reason in str(refused.value)


@pytest.mark.parametrize("data", [b"", b"[]", b"{", b"\xff", b"[" * 100_000])
def test_a_config_that_is_none(data: bytes) -> None:
    with pytest.raises(UnsupportedModel, match="not"):
        AdapterConfig.read(data)


@pytest.mark.parametrize(
    "name",
    [
        "base_model.model.lm_head.lora_A.weight",
        PREFIX + "self_attn.q_proj.lora_A.bias",
        PREFIX + "self_attn.up_proj.lora_A.weight",
        PREFIX + "mlp.experts.0.up_proj.lora_A.weight",
        PREFIX + "self_attn.q_proj.lora_magnitude_vector",
        "base_model.model.model.layers.00.self_attn.q_proj.lora_A.weight",
        "base_model.model.model.layers.x.self_attn.q_proj.lora_A.weight",
    ],
)
def test_other_tensors_are_refused(name: str) -> None:
    with pytest.raises(UnsupportedModel, match="no LoRA matrix"):
        piece_of(name)


def check(tensors: dict[str, torch.Tensor], base: bool = True, dtype: str = "F32") -> None:
    check_tensors(
        [(name, dtype, tensor.shape) for name, tensor in tensors.items()],
        AdapterConfig(8, 1.0),
        Sizes.from_hf(TINY) if base else None,
    )


def test_tensors_must_come_in_pairs_of_the_rank_and_fit_the_base() -> None:
    good = tensors_of(TINY, ALL, 8, 0)
    check(good)
    wide = tensors_of({**TINY, "hidden_size": 64}, ALL, 8, 0)
    check(wide, base=False)
    with pytest.raises(UnsupportedModel, match=r"layers.0.self_attn.q_proj.lora_A.weight \[8, 64\] doesn't fit.* 32"):
        check(wide)
    with pytest.raises(UnsupportedModel, match=r"\[64, 8\] doesn't fit the base model, whose q_proj needs 32 there"):
        check({k: v for k, v in tensors_of({**TINY, "head_dim": 16}, ("q",), 8, 0).items()})
    with pytest.raises(UnsupportedModel, match="layer that the base model hasn't: it has 2"):
        check(tensors_of({**TINY, "num_hidden_layers": 3}, ("q",), 8, 0))
    with pytest.raises(UnsupportedModel, match="must be a matrix of rank 8"):
        check(tensors_of(TINY, ("q",), 4, 0))
    with pytest.raises(UnsupportedModel, match="of I8"):
        check(good, dtype="I8")
    with pytest.raises(UnsupportedModel, match="q_proj of layer 1 has lora_B, but no lora_A"):
        check({k: v for k, v in good.items() if "layers.1.self_attn.q_proj.lora_A" not in k})
    with pytest.raises(UnsupportedModel, match="no tensors"):
        check({})


def test_a_folder_is_published_with_checksums(tmp_path: Path) -> None:
    source = random_folder(tmp_path / "adapter", TINY, 0)
    (source / "README.md").write_text("not sent")
    facts = push_model(source, (tmp_path / "store").as_uri())
    assert facts["tensors"] == 28 and len(facts["revision"]) == 64
    store, manifest, config = read_adapter(facts["url"])
    assert config == AdapterConfig(8, 2.0) and manifest.published and manifest.revision == facts["revision"]
    assert {entry.key for entry in store.list()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
        "manifest.msgpack",
    }


def test_another_scale_is_another_revision(tmp_path: Path) -> None:
    urls = [(tmp_path / f"store {alpha}").as_uri() for alpha in (8, 16)]
    for alpha, url in zip((8, 16), urls, strict=True):
        push_model(random_folder(tmp_path / "adapter", TINY, 0, lora_alpha=alpha), url)
    assert len({read_manifest(open_store(url)).revision for url in urls}) == 2


def test_folders_that_are_no_adapter_are_not_published(tmp_path: Path) -> None:
    url = (tmp_path / "store").as_uri()
    pickled = tmp_path / "pickled"
    pickled.mkdir()
    (pickled / "adapter_config.json").write_text(json.dumps(config_of(ALL, 8)))
    (pickled / "adapter_model.bin").write_bytes(b"\0")
    cases: list[tuple[Path, type[Exception], str]] = [
        (pickled, InvalidSpec, "safetensors"),
        (random_folder(tmp_path / "dora", TINY, 0, use_dora=True), UnsupportedModel, "use_dora"),
        (folder_of(tmp_path / "rank", config_of(ALL, 4), tensors_of(TINY, ALL, 8, 0)), UnsupportedModel, "rank 4"),
        (random_folder(tmp_path / "cut", TINY, 0), ColdStartError, "ends at byte"),
    ]
    weights = tmp_path / "cut" / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-9])
    for source, kind, reason in cases:
        with pytest.raises(kind, match=reason):
            push_model(source, url)
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_weights_that_are_no_numbers_are_not_published(tmp_path: Path, dtype: torch.dtype, value: float) -> None:
    tensors = {name: each.to(dtype) for name, each in tensors_of(TINY, ALL, 8, 0).items()}
    *_, last = sorted(tensors)
    tensors[last].view(-1)[-1] = value
    source = folder_of(tmp_path / "adapter", config_of(ALL, 8), tensors)
    with pytest.raises(UnsupportedModel, match=f"{last} holds 1 numbers that are NaN or infinite"):
        push_model(source, (tmp_path / "store").as_uri())
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_largest_numbers_are_some(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {
        name: torch.full_like(each, torch.finfo(dtype).max, dtype=dtype)
        for name, each in tensors_of(TINY, ALL, 8, 0).items()
    }
    source = folder_of(tmp_path / "adapter", config_of(ALL, 8), tensors)
    assert push_model(source, (tmp_path / "store").as_uri())["tensors"] == len(tensors)


def test_a_damaged_header_is_no_adapter(tmp_path: Path) -> None:
    source = random_folder(tmp_path / "adapter", TINY, 0)
    (source / "adapter_model.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(ManifestInvalid):
        push_model(source, (tmp_path / "store").as_uri())


def test_a_deployment_is_told_which_adapter_is_wrong(tmp_path: Path, tiny_store_url: str) -> None:
    config = json.loads(open_store(tiny_store_url).read("config.json"))
    for name, hf_config, rank in (("good", config, 8), ("high", config, 32), ("wide", {**config, "hidden_size": 8}, 8)):
        push_model(random_folder(tmp_path / name, hf_config, 0, rank=rank), (tmp_path / f"{name}-store").as_uri())
    url = {name: (tmp_path / f"{name}-store").as_uri() for name in ("good", "high", "wide", "none")}
    revision = read_manifest(open_store(url["good"])).revision
    assert check_adapters(tiny_store_url, {"a": url["good"], "b": url["good"]}, 16) == [revision] * 2
    for bad, reason in (
        (url["high"], "Adapter 'b' has rank 32, above adapter_rank 16"),
        (url["wide"], "Adapter 'b' can't be served: .*doesn't fit the base model"),
        (url["none"], "Adapter 'b' can't be served: .*no adapter was published there"),
        (tiny_store_url, "Adapter 'b' can't be served: .*what was published there is no adapter"),
        ("ftp://x", "Adapter 'b' can't be served: store URL"),
    ):
        with pytest.raises(AdapterRefused, match=reason):
            check_adapters(tiny_store_url, {"a": url["good"], "b": bad}, 16)
    with pytest.raises(AdapterRefused, match="The base model can't be read"):
        check_adapters(url["none"], {"a": url["good"]}, 16)
