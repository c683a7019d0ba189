"""A pool limits what its process may take of the device, and other tests share that process."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def whole_device() -> Iterator[None]:
    yield
    if torch.cuda.is_available():
        torch.cuda.set_per_process_memory_fraction(1.0)
