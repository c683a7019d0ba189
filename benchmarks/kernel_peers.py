"""The same operations in other kernel libraries, where they are installed: liger-kernel and FlashInfer. Neither is a
dependency; FlashInfer compiles its kernels at the first call."""

import functools
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

Call = Callable[[], object]
Calls = dict[str, Call]
EPS = 1e-5


def rms_norm(x: torch.Tensor, weight: torch.Tensor) -> Calls:
    calls: Calls = {}
    if liger := installed("liger_kernel.ops.rms_norm"):
        calls["liger"] = lambda: liger.LigerRMSNormFunction.apply(x, weight, EPS, 0.0, "llama", False)
    if norm := installed("flashinfer.norm"):
        calls["flashinfer"] = lambda: norm.rmsnorm(x, weight, EPS)
    return calls


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> Calls:
    calls: Calls = {}
    if liger := installed("liger_kernel.ops.fused_add_rms_norm"):
        calls["liger"] = lambda: liger.LigerFusedAddRMSNormFunction.apply(x, residual, weight, EPS)
    if norm := installed("flashinfer.norm"):
        # In place, both of them.
        copy = x.clone()
        calls["flashinfer"] = lambda: norm.fused_add_rmsnorm(copy, residual, weight, EPS)
    return calls


def silu_mul(gate_up: torch.Tensor) -> Calls:
    calls: Calls = {}
    if liger := installed("liger_kernel.ops.swiglu"):
        gate, up = (half.contiguous() for half in gate_up.chunk(2, dim=-1))
        calls["liger"] = lambda: liger.LigerSiLUMulFunction.apply(gate, up)
    if activation := installed("flashinfer.activation"):
        calls["flashinfer"] = lambda: activation.silu_and_mul(gate_up)
    return calls


def decode(q: torch.Tensor, cache: torch.Tensor, table: torch.Tensor) -> Calls:
    """q [S, Hq, D]; cache [N, 2, B, Hkv, D] with every context a whole number of blocks of equal length."""
    library = installed("flashinfer")
    if library is None:
        return {}
    sequences, width = table.shape
    pages = cache.contiguous()

    @functools.cache
    def planned() -> Any:
        workspace = torch.empty(128 << 20, dtype=torch.uint8)
        # On tensor cores, as serving engines ask of it for four query heads or more to a key head.
        wrapper = library.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
        starts = torch.arange(sequences + 1, dtype=torch.int32) * width
        last = torch.full((sequences,), cache.shape[2], dtype=torch.int32)
        wrapper.plan(starts, table.flatten(), last, q.shape[1], cache.shape[3], q.shape[2], cache.shape[2],
                     q_data_type=q.dtype, kv_data_type=cache.dtype)  # fmt: skip
        return wrapper

    return {"flashinfer": lambda: planned().run(q, pages)}


def prefill(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> Calls:
    """One sequence's q [T, Hq, D] over its own keys and values [T, Hkv, D], not paged."""
    library = installed("flashinfer")
    return {"flashinfer": lambda: library.single_prefill_with_kv_cache(q, keys, values, causal=True)} if library else {}


def sample(logits: torch.Tensor, top_k: int, top_p: float) -> Calls:
    library = installed("flashinfer.sampling")
    if library is None or not (top_k or top_p < 1):
        return {}
    # Without a generator its seed is the same in every call anyway, but reading it is forbidden inside a CUDA graph.
    library.get_seed_and_offset = lambda *_: (0, 0)

    def draw() -> object:
        weights = library.softmax(logits, temperature=0.7)
        if not top_k:
            return library.top_p_sampling_from_probs(weights, top_p)
        if top_p == 1:
            return library.top_k_sampling_from_probs(weights, top_k)
        return library.top_k_top_p_sampling_from_probs(weights, top_k, top_p)

    return {"flashinfer": draw}


def installed(module: str) -> Any:
    return import_module(module) if find_spec(module.partition(".")[0]) else None
