"""Imported by the zygote of a host with GPUs for the engine processes forked from it: all kernels, and what it takes to
find them compiled, as far as that needs no device."""

from stoker.coldstart import device_check, xxh3
from stoker.kernels import device, invariant, launch
from stoker.runtime.engine import prepare

__all__ = ["device", "device_check", "invariant", "prepare"]

launch.prime()
xxh3.prime()
