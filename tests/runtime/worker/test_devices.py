import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from stoker.runtime.worker.devices import gpu_facts


def driver(models: dict[str, int], *, missing: bool = False) -> Any:
    """NVIDIA's management library as the functions used of it."""

    class NVMLError(Exception): ...

    def start() -> None:
        if missing:
            raise NVMLError("no driver")

    module: Any = ModuleType("pynvml")
    module.__spec__ = SimpleNamespace(name="pynvml")
    module.NVMLError = NVMLError
    module.nvmlInit, module.nvmlShutdown = start, lambda: None
    module.nvmlDeviceGetCount = lambda: len(models)
    module.nvmlDeviceGetHandleByIndex = lambda index: list(models)[index]
    module.nvmlDeviceGetName = lambda handle: handle
    module.nvmlDeviceGetMemoryInfo = lambda handle: SimpleNamespace(total=models[handle])
    return module


def test_models_and_memory_as_the_driver_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", driver({"NVIDIA L4": 24, "NVIDIA L40S": 48}))
    assert gpu_facts() == [{"model": "NVIDIA L4", "memory": 24}, {"model": "NVIDIA L40S", "memory": 48}]


def test_no_facts_without_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", driver({}, missing=True))
    assert gpu_facts() == []
