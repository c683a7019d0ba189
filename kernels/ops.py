"""The operations of a model step: Triton (and cuBLAS) for CUDA tensors, plain torch for the others, same signatures.

Shapes and meanings are documented in `reference`. No operation reads a device value on the host, and launch grids
depend on tensor shapes alone, so every CUDA operation can be captured in a graph and replayed with other lengths.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, wraps
from types import ModuleType
from typing import Any, ParamSpec, TypeVar

from stoker.kernels import reference

P = ParamSpec("P")
R = TypeVar("R")
_invariant = ContextVar("batch invariant", default=False)


def dispatched(operation: Callable[P, R]) -> Callable[P, R]:
    """The Triton version of a reference operation where its first argument is on a GPU."""

    @wraps(operation)
    def call(*args: P.args, **options: P.kwargs) -> R:
        first: Any = args[0]
        own = getattr(_triton(_invariant.get()), operation.__name__) if first.is_cuda else operation
        return own(*args, **options)

    return call


embed = reference.embed
rms_norm = dispatched(reference.rms_norm)
add_rms_norm = dispatched(reference.add_rms_norm)
rope_store = dispatched(reference.rope_store)
paged_attention = dispatched(reference.paged_attention)
full_attention = dispatched(reference.full_attention)
linear = dispatched(reference.linear)
gated_linear = dispatched(reference.gated_linear)
add_lora = dispatched(reference.add_lora)
silu_mul = dispatched(reference.silu_mul)
log_total = dispatched(reference.log_total)
steer = dispatched(reference.steer)
sample = dispatched(reference.sample)


@contextmanager
def batch_invariant(wanted: bool) -> Iterator[None]:
    """CUDA operations meanwhile give a row the same bits whatever batch it is in; see `invariant` for their price. In
    plain torch only a batch of one row has this property."""
    token = _invariant.set(wanted)
    try:
        yield
    finally:
        _invariant.reset(token)


def late_kernels() -> int:
    """Kernels that were compiled while a request waited; none where Triton isn't used."""
    launch = sys.modules.get("stoker.kernels.launch")
    return launch.origins()["late"] if launch else 0


@cache
def _triton(invariant: bool) -> ModuleType:
    # A process without a GPU never pays for importing Triton.
    if invariant:
        from stoker.kernels import invariant as operations
    else:
        from stoker.kernels import device as operations
    return operations
