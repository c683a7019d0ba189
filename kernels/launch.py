"""What every Triton module needs around its kernels: the decorator, its count of compiled variants, grid arithmetic."""

from collections.abc import Callable
from functools import partial
from typing import Any

import triton

_KERNELS: list[Any] = []


def jit(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """`triton.jit` whose kernels `compiled_variants` counts."""
    if function is None:
        return partial(jit, **options)
    kernel: Any = triton.jit(function, **options)
    _KERNELS.append(kernel)
    return kernel


def compiled_variants() -> int:
    """Kernel variants made since the process started; a request that raises it has waited for a compiler."""
    return sum(len(cache[0]) for kernel in _KERNELS for cache in kernel.device_caches.values())


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least n >= 1."""
    return 1 << (n - 1).bit_length()
