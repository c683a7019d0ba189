"""What `benchmarks.kernels` measures: the operations of an 8B Llama's step, their inputs, work and targets."""

from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F

from benchmarks import kernel_peers
from stoker.kernels import ops

Q_HEADS, KV_HEADS, DIM, HIDDEN, INTERMEDIATE, VOCAB = 32, 8, 128, 4096, 14336, 128256
BLOCK = 16
DTYPE = torch.bfloat16
# Below this many tokens a product is bound by reading its weight (H200: about 790 TFLOP/s over 4.3 TB/s).
COMPUTE_BOUND_TOKENS = 184

Call = Callable[[], object]
# By whose: "stoker", "torch", and the libraries of kernel_peers that are installed.
Calls = dict[str, Call]
# Query, cache layer, block table, query_start (None: a token each) and context_len.
Case = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor]


class Target(NamedTuple):
    """At least this percentage of the copy rate or this many TFLOP/s, or at most this many microseconds."""

    value: float
    unit: Literal["% of copy", "TFLOP/s", "us"]

    def met(self, seconds: float, rate: float, copy: float) -> bool:
        if self.unit == "us":
            return seconds * 1e6 <= self.value
        return rate / (copy / 100 if self.unit == "% of copy" else 1e12) >= self.value

    def __str__(self) -> str:
        return f"{'<=' if self.unit == 'us' else '>='} {self.value:g} {self.unit}"


class Workload(NamedTuple):
    """`inputs()` makes fresh random inputs, and everybody's call on them."""

    kernel: str
    shape: str
    moved: float  # bytes that must cross device memory; 0 where arithmetic is the limit
    flops: float
    target: Target | None
    ceiling: Literal["read", "copy", "product"]
    inputs: Callable[[], Calls]


def workloads() -> Iterator[Workload]:
    yield decode(1, 1024, None)
    yield decode(1, 8192, Target(60, "% of copy"))
    yield decode(8, 8192, Target(85, "% of copy"))
    yield decode(64, 1024, Target(85, "% of copy"))
    yield decode(256, 1024, Target(85, "% of copy"))
    yield decode(64, 4096, Target(85, "% of copy"))
    yield prefill([(2048, 2048)], None)
    yield prefill([(4096, 4096)], Target(400, "TFLOP/s"))
    yield prefill([(8192, 8192)], Target(400, "TFLOP/s"))
    yield prefill([(2048, 2048)] * 4, None)
    yield prefill([(512, 8192)], None)
    yield prefill([(448, 1024)] + [(1, 1024)] * 64, None)
    for tokens in (1, 64, 2048, 8192):
        large = tokens >= 2048
        small = Target(3, "us")
        yield rms_norm(tokens, Target(90, "% of copy") if large else small)
        yield add_rms_norm(tokens, Target(90, "% of copy") if large else small)
        yield silu_mul(tokens, Target(90, "% of copy") if large else None)
        yield rope_store(tokens, Target(80, "% of copy") if large else None)
    for tokens in (1, 2, 4, 8, 64, 256, 2048, 8192):
        yield linear("qkv", tokens, HIDDEN, (Q_HEADS + 2 * KV_HEADS) * DIM)
        yield linear("o", tokens, HIDDEN, HIDDEN)
        yield linear("gate_up", tokens, HIDDEN, 2 * INTERMEDIATE)
        yield linear("down", tokens, INTERMEDIATE, HIDDEN)
    for rows in (1, 64):
        yield linear("lm_head", rows, HIDDEN, VOCAB)
        yield sampler("greedy", rows, Target(40, "us"), greedily, temperature=0.0)
        yield sampler("temperature", rows, Target(40, "us"), freely)
        yield sampler("top-k 50", rows, Target(300, "us"), filtered_by_sorting, top_k=50)
        yield sampler("top-p 0.9", rows, Target(300, "us"), filtered_by_sorting, top_p=0.9)
        yield sampler("top-k 50, top-p 0.9", rows, Target(300, "us"), filtered_by_sorting, top_k=50, top_p=0.9)


def paged(steps: list[tuple[int, int]], dim: int = DIM) -> Case:
    """The inputs, over a shuffled block table, of (new tokens, context) sequences."""
    lengths, contexts = zip(*steps, strict=True)
    width = -(-max(contexts) // BLOCK)
    # Two layers, so that blocks are strided as they are in a model's cache.
    cache = torch.randn(len(steps) * width + 1, 2, 2, BLOCK, KV_HEADS, dim, dtype=DTYPE)
    table = (torch.randperm(len(steps) * width) + 1).int().view(-1, width)
    q = torch.randn(sum(lengths), Q_HEADS, dim, dtype=DTYPE)
    start = None if set(lengths) == {1} else torch.tensor([0, *lengths]).cumsum(0).int()
    return q, cache[:, 1], table, start, torch.tensor(contexts).int()


def ours_over(case: Case) -> Call:
    q, kv_layer, table, start, context = case
    return lambda: ops.paged_attention(q, kv_layer, table, start, context, DIM**-0.5)


def dense_attention(case: Case, sequences: int, context: int, causal: bool) -> Call:
    """torch SDPA of the same queries over contiguous keys and values, without paging."""
    q = case[0].view(sequences, -1, Q_HEADS, DIM).transpose(1, 2)
    keys, values = torch.randn(2, sequences, KV_HEADS, context, DIM, dtype=DTYPE)
    return lambda: F.scaled_dot_product_attention(q, keys, values, is_causal=causal, enable_gqa=True)


def decode(batch: int, context: int, target: Target | None) -> Workload:
    def inputs() -> Calls:
        case = paged([(1, context)] * batch)
        q, cache, table, *_ = case
        dense = dense_attention(case, batch, context, causal=False)
        return {"stoker": ours_over(case), "torch": dense, **kernel_peers.decode(q, cache, table)}

    moved = 2 * (2 * batch * context * KV_HEADS * DIM + 2 * batch * Q_HEADS * DIM)
    return Workload("attention, decode", f"B {batch}, ctx {context}", moved, 0, target, "read", inputs)


def prefill(steps: list[tuple[int, int]], target: Target | None) -> Workload:
    new, context = steps[0]
    whole_prompts = all(step == (context, context) for step in steps)

    def inputs() -> Calls:
        case = paged(steps)
        calls: Calls = {"stoker": ours_over(case)}
        if whole_prompts:
            calls["torch"] = dense_attention(case, len(steps), context, causal=True)
        if whole_prompts and len(steps) == 1:
            calls |= kernel_peers.prefill(case[0], *torch.randn(2, context, KV_HEADS, DIM, dtype=DTYPE))
        return calls

    # The last of n new tokens sees c keys, the first c - n + 1; two products of 2 D operations per key and head.
    seen = sum(n * (c - n) + n * (n + 1) / 2 for n, c in steps)
    count = f"{len(steps)} x {new}" if len(set(steps)) == 1 else f"{new} + {len(steps) - 1} x 1"
    return Workload(
        "attention, prefill", f"{count}, ctx {context}", 0, 4 * seen * Q_HEADS * DIM, target, "product", inputs
    )


def rms_norm(tokens: int, target: Target) -> Workload:
    weight = torch.ones(HIDDEN, dtype=DTYPE)

    def inputs() -> Calls:
        x = torch.randn(tokens, HIDDEN, dtype=DTYPE)
        return {
            "stoker": lambda: ops.rms_norm(x, weight, 1e-5),
            "torch": lambda: F.rms_norm(x, (HIDDEN,), weight, 1e-5),
            **kernel_peers.rms_norm(x, weight),
        }

    return Workload("rms_norm", f"T {tokens}", 4 * tokens * HIDDEN, 0, target, "copy", inputs)


def add_rms_norm(tokens: int, target: Target) -> Workload:
    weight = torch.ones(HIDDEN, dtype=DTYPE)

    def inputs() -> Calls:
        x, residual = torch.zeros(tokens, HIDDEN, dtype=DTYPE), torch.randn(tokens, HIDDEN, dtype=DTYPE)
        return {
            "stoker": lambda: ops.add_rms_norm(x, residual, weight, 1e-5),
            "torch": lambda: F.rms_norm(residual.add_(x), (HIDDEN,), weight, 1e-5),
            **kernel_peers.add_rms_norm(x, residual, weight),
        }

    return Workload("add_rms_norm", f"T {tokens}", 8 * tokens * HIDDEN, 0, target, "copy", inputs)


def silu_mul(tokens: int, target: Target | None) -> Workload:
    def inputs() -> Calls:
        x = torch.randn(tokens, 2 * INTERMEDIATE, dtype=DTYPE)
        gate, up = x.chunk(2, dim=-1)
        ours = {"stoker": lambda: ops.silu_mul(x), "torch": lambda: F.silu(gate) * up}
        return ours | kernel_peers.silu_mul(x)

    return Workload("silu_mul", f"T {tokens}", 6 * tokens * INTERMEDIATE, 0, target, "copy", inputs)


def rope_store(tokens: int, target: Target | None) -> Workload:
    angles = torch.rand(8192, DIM // 2) * 6
    cos_sin, positions = torch.cat((angles.cos(), angles.sin()), 1), torch.arange(tokens)

    def inputs() -> Calls:
        qkv = torch.randn(tokens, Q_HEADS + 2 * KV_HEADS, DIM, dtype=DTYPE)
        q, k, v = qkv.split((Q_HEADS, KV_HEADS, KV_HEADS), dim=1)
        blocks = -(-tokens // BLOCK) + 1
        cache = torch.zeros(blocks, 2, 2, BLOCK, KV_HEADS, DIM, dtype=DTYPE)[:, 1]
        slots = torch.randperm(blocks * BLOCK)[:tokens]
        step = (q, k, v, cos_sin, positions, cache, slots)
        return {"stoker": lambda: ops.rope_store(*step), "torch": lambda: rope_store_eagerly(*step)}

    moved = 2 * 2 * tokens * (Q_HEADS + 2 * KV_HEADS) * DIM
    return Workload("rope_store", f"T {tokens}", moved, 0, target, "copy", inputs)


def rope_store_eagerly(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    cache: torch.Tensor,
    slots: torch.Tensor,
) -> torch.Tensor:
    """What a model in plain torch does: separate rotations in bf16, then indexed writes."""
    cos, sin = cos_sin[positions, None].to(q.dtype).chunk(2, dim=-1)

    def rotated(x: torch.Tensor) -> torch.Tensor:
        low, high = x.chunk(2, dim=-1)
        return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)

    block, offset = slots // BLOCK, slots % BLOCK
    cache[block, 0, offset] = rotated(k)
    cache[block, 1, offset] = v
    return rotated(q)


def linear(name: str, tokens: int, depth: int, width: int) -> Workload:
    def inputs() -> Calls:
        x, weight = torch.randn(tokens, depth, dtype=DTYPE), torch.randn(width, depth, dtype=DTYPE)
        return {"stoker": lambda: ops.linear(x, weight), "torch": lambda: F.linear(x, weight)}

    moved = 2 * (width * depth + tokens * (width + depth)) if tokens < COMPUTE_BOUND_TOKENS else 0
    target = Target(85, "% of copy") if tokens == 1 else None
    flops, ceiling = 2 * tokens * width * depth, "read" if moved else "product"
    return Workload(f"linear, {name}", f"M {tokens}", moved, flops, target, ceiling, inputs)


def sampler(
    name: str,
    rows: int,
    target: Target,
    in_torch: Callable[[torch.Tensor, int, float], torch.Tensor],
    temperature: float = 0.7,
    top_k: int = 0,
    top_p: float = 1.0,
) -> Workload:
    ones, seed = torch.ones(rows), torch.arange(rows)
    params = (ones * temperature, (ones * top_k).int(), ones * top_p, ones * 0, seed, seed)

    def inputs() -> Calls:
        logits = torch.randn(rows, VOCAB, dtype=DTYPE) * 3
        ours = {"stoker": lambda: ops.sample(logits, *params), "torch": lambda: in_torch(logits, top_k, top_p)}
        return ours | kernel_peers.sample(logits, top_k, top_p)

    return Workload(f"sample, {name}", f"B {rows}", 2 * rows * VOCAB, 0, target, "read", inputs)


def greedily(logits: torch.Tensor, top_k: int, top_p: float) -> torch.Tensor:
    return logits.argmax(-1)


def freely(logits: torch.Tensor, top_k: int, top_p: float) -> torch.Tensor:
    weight = (logits.float() / 0.7).softmax(-1)
    return (weight / torch.empty_like(weight).exponential_()).argmax(-1)


def filtered_by_sorting(logits: torch.Tensor, top_k: int, top_p: float) -> torch.Tensor:
    """Sort, cut and draw among what is left."""
    ordered, tokens = (logits.float() / 0.7).sort(-1, descending=True)
    if top_k:
        ordered[:, top_k:] = -torch.inf
    weight = ordered.softmax(-1)
    weight = weight.masked_fill(weight.cumsum(-1) - weight > top_p, 0)
    return tokens.gather(1, (weight / torch.empty_like(weight).exponential_()).argmax(-1, keepdim=True))
