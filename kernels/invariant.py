# ruff: noqa: F401
"""The Triton operations of batch-invariant steps: a row's result is the same bits whatever rows are computed with it,
however many, and in however many steps its sequence came here.

A sum's bits depend on its order, and the usual operations choose that by the number of rows, for speed. These have one
way to cut up their work, chosen by the model's shapes alone; rows of a tile don't mix. Those that stand under their
usual names have only one way anyhow. The price is speed, most of all for a few sequences.
"""

from functools import partial

from torch import Tensor

from stoker.kernels import activation, attention, lora, rope
from stoker.kernels.attention_plan import plan
from stoker.kernels.full_attention import full_attention
from stoker.kernels.matmul import linear
from stoker.kernels.norm import add_rms_norm, rms_norm
from stoker.kernels.sampling import sample
from stoker.kernels.steering import log_total, steer

add_lora = partial(lora.add_lora, tile=(64, 4))
paged_attention = partial(attention.paged_attention, choose=partial(plan, invariant=True))
rope_store = partial(rope.rope_store, block=4)
silu_mul = partial(activation.silu_mul, block=1024)


def gated_linear(x: Tensor, gate_up: Tensor) -> Tensor:
    return silu_mul(linear(x, gate_up))
