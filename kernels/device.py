# ruff: noqa: F401
"""The Triton versions under one name; `ops` imports this module on the first CUDA tensor it sees."""

from stoker.kernels.activation import silu_mul
from stoker.kernels.attention import paged_attention
from stoker.kernels.full_attention import full_attention
from stoker.kernels.gemv import gated_linear, linear
from stoker.kernels.lora import add_lora
from stoker.kernels.norm import add_rms_norm, rms_norm
from stoker.kernels.rope import rope_store
from stoker.kernels.sampling import sample
from stoker.kernels.steering import log_total, steer
