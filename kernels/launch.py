"""What every Triton module needs around its kernels: the decorator, what was compiled and restored, early starts, grid
arithmetic."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache, partial
from importlib import import_module
from typing import Any

import torch
import triton
import triton.language as tl
from triton import knobs
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.runtime.cache import triton_key

AT_FIRST_LAUNCH = ("triton.experimental.gluon", "triton.experimental.gluon.nvidia.hopper")
_KERNELS: list[Any] = []
_ORIGINS = {"compiled": 0, "restored": 0, "late": 0}
_warming = False


def jit(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """`triton.jit` whose kernels `prime` knows."""
    if function is None:
        return partial(jit, **options)
    kernel: Any = triton.jit(function, **options)
    _KERNELS.append(kernel)
    return kernel


@contextmanager
def warming_up() -> Iterator[None]:
    """No request waits for what is compiled meanwhile."""
    global _warming
    _warming = True
    try:
        yield
    finally:
        _warming = False


def origins() -> dict[str, int]:
    """How many of them were compiled here, how many found compiled in Triton's cache, and for how many of the compiled
    ones some request has waited ("late")."""
    return dict(_ORIGINS)


def note_origin(*, cache_hit: bool, **_: Any) -> None:
    _ORIGINS["restored" if cache_hit else "compiled"] += 1
    _ORIGINS["late"] += not (cache_hit or _warming)


knobs.compilation.listener = note_origin


def prime() -> None:
    """Computes what no device decides of the names of compiled kernels: hashes of all of Triton, which take most of a
    second, and of every kernel's source; and imports what Triton would import at the first launch. Processes forked
    later have all this."""
    for name in AT_FIRST_LAUNCH:
        with suppress(ImportError):
            import_module(name)
    triton_key()
    for kernel in _KERNELS:
        _ = kernel.cache_key


@cache
def starts_early(device: torch.device) -> bool:
    """Whether kernels may be launched before the one ahead of them has ended: programmatic dependent launch, from
    Hopper on. Such a kernel calls `await_inputs` before it touches anything that another kernel writes."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


@jit
def await_inputs(EARLY: tl.constexpr):
    """Lets the next kernel start as soon as this one's last programs run, then waits for all kernels ahead to end."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least n >= 1."""
    return 1 << (n - 1).bit_length()
