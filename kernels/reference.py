"""Every operation of the model in plain torch: what a CPU runs, and what the Triton versions must equal.

T tokens of the step (the sequences' new tokens, concatenated), S sequences, N cache blocks of B tokens.
"""

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from stoker.kernels import philox

GREEDY_BELOW = 1e-5

SEEN_IN_PROMPT = 1 << 30

QKNorms = tuple[Tensor, Tensor, float]


def embed(ids: Tensor, weight: Tensor) -> Tensor:
    """ids i64[T], weight [V, H] -> [T, H]."""
    return F.embedding(ids, weight)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., in], weight [out, in] -> [..., out]."""
    return F.linear(x, weight, bias)


def gated_linear(x: Tensor, gate_up: Tensor) -> Tensor:
    """x [..., in], gate_up [2 * inner, in] (gates first) -> SiLU(gate) * up [..., inner]."""
    return silu_mul(F.linear(x, gate_up))


def add_lora(y: Tensor, x: Tensor, a: Tensor, b: Tensor, slots: Tensor, first: int) -> None:
    """y [T, N] += x [T, K] A^T B^T in place, by the adapter that slots i32[T] names for a row: 1 to L, or 0 for none.

    a [L, P * R, K] and b [L, N, R] may be strided in L. The product has P parts: the `first` columns of y and equal
    ones after them; each has R lines of a. Sums are float32, rounded to x's dtype between the products and at the end.
    """
    rank = b.shape[2]
    for slot in set(slots.tolist()) - {0}:
        rows, lines = (slots == slot).nonzero().squeeze(1), b[slot - 1].float()
        middle = (x[rows].float() @ a[slot - 1].float().T).to(x.dtype).float().split(rank, 1)
        parts = (lines[:first], *(lines[first:].chunk(len(middle) - 1) if len(middle) > 1 else ()))
        added = torch.cat([own @ part.T for own, part in zip(middle, parts, strict=True)], 1)
        y[rows] = (y[rows].float() + added).to(y.dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [T, H] / rms(x) * weight [H], in float32, rounded once to x's dtype."""
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale * weight.float()).to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """residual += x in place, then (rms_norm(residual), residual); the norm reads the rounded sum."""
    residual.add_(x)
    return rms_norm(residual, weight, eps), residual


def rope_store(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    kv_layer: Tensor,
    slots: Tensor,
    norms: QKNorms | None = None,
) -> Tensor:
    """Rotate q [T, Hq, D] and k [T, Hkv, D] (half-rotation), write k and v into the cache, return the rotated q.

    cos_sin f32[P, D]: cosines in the first half of a row, sines in the second. kv_layer [N, 2, B, Hkv, D] may be
    strided. slots i64[T] = block * B + offset; -1 stores nothing. `norms`: RMSNorm weights [D] of queries and keys and
    their epsilon, applied to every head before the rotation.
    """
    if norms is not None:
        q, k = rms_norm(q, norms[0], norms[2]), rms_norm(k, norms[1], norms[2])
    cos, sin = cos_sin[positions].unsqueeze(1).chunk(2, dim=-1)
    kept = (slots >= 0).nonzero().squeeze(1)
    block, offset = slots[kept] // kv_layer.shape[2], slots[kept] % kv_layer.shape[2]
    kv_layer[block, 0, offset] = _rotate(k, cos, sin)[kept]
    kv_layer[block, 1, offset] = v[kept]
    return _rotate(q, cos, sin)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    low, high = x.float().chunk(2, dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1).to(x.dtype)


def paged_attention(
    q: Tensor,
    kv_layer: Tensor,
    block_table: Tensor,
    query_start: Tensor | None,
    context_len: Tensor,
    scale: float,
    window: int = 0,
) -> Tensor:
    """Causal grouped-query attention of q [T, Hq, D] over the paged cache -> [T, Hq, D].

    block_table i32[S, M], query_start i32[S + 1], context_len i32[S] (cached tokens, this step's included). Row i of
    sequence s stands at position context_len[s] - query_len[s] + i. Rows of no sequence, or without context, are 0.
    Without query_start (a decode step) row s is sequence s's only one.
    With a window (0: none) a token sees that many positions, its own included.
    """
    out = torch.zeros_like(q)
    contexts = context_len.tolist()
    starts = range(len(contexts) + 1) if query_start is None else query_start.tolist()
    for s, context in enumerate(contexts):
        rows = slice(starts[s], starts[s + 1])
        if context and rows.stop > rows.start:
            blocks = block_table[s, : -(-context // kv_layer.shape[2])].long()
            keys, values = kv_layer[blocks].transpose(0, 1).flatten(1, 2)[:, :context]
            out[rows] = _attend(q[rows], keys, values, scale, window)
    return out


def _attend(q: Tensor, keys: Tensor, values: Tensor, scale: float, window: int) -> Tensor:
    """One sequence: q [L, Hq, D] are the last L of the C positions in keys and values [C, Hkv, D]."""
    length, q_heads, dim = q.shape
    if window:
        seen = window + length - 1
        keys, values = keys[-seen:], values[-seen:]
    context, kv_heads, _ = keys.shape
    packed = q.view(length, kv_heads, -1, dim).permute(1, 2, 0, 3).flatten(1, 2)
    mask = None
    if length > 1:
        mask = torch.ones(length, context, dtype=torch.bool, device=q.device).tril(context - length)
        if window:
            mask = mask.triu(context - length - window + 1)
        mask = mask.repeat(q_heads // kv_heads, 1)
    mixed = F.scaled_dot_product_attention(
        packed[None], keys.transpose(0, 1)[None], values.transpose(0, 1)[None], attn_mask=mask, scale=scale
    )
    return mixed.view(kv_heads, -1, length, dim).permute(2, 0, 1, 3).reshape(length, q_heads, dim)


def full_attention(q: Tensor, k: Tensor, v: Tensor, query_start: Tensor, scale: float) -> Tensor:
    """Every token sees its whole sequence: q, k, v [T, H, D], query_start i32[S + 1] with T at its end -> [T, H, D]."""
    out = torch.empty_like(q)
    for start, stop in pairwise(query_start.tolist()):
        own_q, own_k, own_v = (part[start:stop].transpose(0, 1)[None] for part in (q, k, v))
        out[start:stop] = F.scaled_dot_product_attention(own_q, own_k, own_v, scale=scale)[0].transpose(0, 1)
    return out


def silu_mul(gate_up: Tensor) -> Tensor:
    """gate_up [T, 2I] -> silu(gate) * up [T, I], in float32, rounded once."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (F.silu(gate) * up).to(gate_up.dtype)


def steer(
    logits: Tensor,
    seen: Tensor,
    slots: Tensor,
    presence: Tensor,
    frequency: Tensor,
    repetition: Tensor,
    allowed: Tensor | None,
) -> None:
    """Changes logits f32[R, V] in place, before they are sampled from.

    seen i32[N, V] counts each token's occurrences in an answer, plus SEEN_IN_PROMPT if the prompt has it; slots i32[R]
    is a row's line of it, -1 for a row without penalties. repetition f32[R] divides (negative logits: multiplies) what
    was seen anywhere (CTRL, arXiv 1909.05858); frequency and presence f32[R] are subtracted per occurrence, and once,
    for what the answer has. allowed i32[R, ceil(V / 32)] or None: a bit per token; others become -inf (NaN, inf stay).
    """
    penalised = (slots >= 0).nonzero().squeeze(1)
    if penalised.numel():
        own, values = seen[slots[penalised].long()], logits[penalised]
        scale = repetition[penalised, None]
        values = torch.where(own > 0, torch.where(values > 0, values / scale, values * scale), values)
        count = own % SEEN_IN_PROMPT
        values = values - count * frequency[penalised, None] - (count > 0) * presence[penalised, None]
        logits[penalised] = values
    if allowed is not None:
        token = torch.arange(logits.shape[1], device=logits.device)
        forbidden = (allowed[:, token // 32] >> (token % 32)) & 1 == 0
        logits.masked_fill_(forbidden & (logits < torch.inf), -torch.inf)


def log_total(logits: Tensor) -> Tensor:
    """log(sum(exp(logits f32[R, V]))) of each row, f32[R, 1]: a row minus this are its tokens' log-probabilities."""
    # Threads share a row out when there are few.
    return torch.cat([row.logsumexp(-1, keepdim=True) for row in logits.split(1)])


def sample(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, seed: Tensor, position: Tensor
) -> Tensor:
    """One token id per row of logits [S, V] -> i64[S].

    temperature f32[S] (below 1e-5: greedy, the lowest id wins a tie), top_k i32[S] (0 = off), top_p f32[S]
    (1 = off), min_p f32[S] (0 = off), seed i64[S], position i64[S]. Filters apply in that order to the tempered
    distribution and keep all tokens that tie with the last one kept. The draw is the Gumbel-max of the survivors with
    noise from (seed, position, token id) alone. A row with a NaN or a maximum that isn't finite gives -1.
    """
    logits = logits.float()
    tokens = logits.argmax(-1)
    peak = logits.amax(-1)
    drawn = (temperature >= GREEDY_BELOW).nonzero().squeeze(1)
    if drawn.numel():
        rows = logits[drawn].nan_to_num(nan=0.0)
        scores = rows / temperature[drawn, None]
        scores = scores + philox.gumbel(philox.token_words(seed[drawn], position[drawn], logits.shape[1]))
        floor = _filter_floor(rows, temperature[drawn], top_k[drawn], top_p[drawn], min_p[drawn])
        tokens[drawn] = scores.masked_fill_(rows < floor[:, None], -torch.inf).argmax(-1)
    return tokens.masked_fill_(~peak.isfinite(), -1)


def _filter_floor(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """The lowest logit that survives top-k, top-p and min-p, float32[S]."""
    floor = logits.amax(-1) + temperature * min_p.log()
    limited = ((top_k > 0) & (top_k < logits.shape[1]) | (top_p < 1)).nonzero().squeeze(1)
    if limited.numel():
        lowest = _nucleus(logits[limited], temperature[limited], top_k[limited], top_p[limited])
        floor[limited] = torch.maximum(floor[limited], lowest)
    return floor


def _nucleus(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    ordered = logits.sort(-1, descending=True).values
    last = torch.where(top_k > 0, top_k, logits.shape[1]).clamp(max=logits.shape[1]).long()[:, None] - 1
    kth = ordered.gather(1, last)
    weight = torch.exp((ordered - ordered[:, :1]) / temperature[:, None]).double()
    mass = weight.masked_fill_(ordered < kth, 0).cumsum(-1)
    enough = (mass >= top_p.clamp(max=1)[:, None] * mass[:, -1:]).to(torch.uint8).argmax(-1, keepdim=True)
    nucleus = ordered.gather(1, enough)
    return torch.where(top_p[:, None] < 1, torch.maximum(kth, nucleus), kth).squeeze(1)
