"""The GPUs of this host, found without opening a CUDA context."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any


def find_devices() -> list[str]:
    """The GPUs of this host by their device files; a host without any serves on its CPU."""
    gpus = sorted(path.name.removeprefix("nvidia") for path in Path("/dev").glob("nvidia[0-9]*"))
    return [f"cuda:{index}" for index in gpus] or ["cpu"]


def gpu_facts() -> list[dict[str, Any]]:
    """Model and memory (bytes) of each GPU as the driver says (PyPI: nvidia-ml-py); [] without driver or library."""
    if find_spec("pynvml") is None:
        return []
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        return [
            {"model": pynvml.nvmlDeviceGetName(handle), "memory": pynvml.nvmlDeviceGetMemoryInfo(handle).total}
            for handle in handles
        ]
    finally:
        pynvml.nvmlShutdown()
