from collections.abc import Iterator

import pytest
import torch

from tests.runtime.engine.conftest import TinyModel


@pytest.fixture(scope="session")
def tiny() -> TinyModel:
    return TinyModel.random()


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """A small model is slower on several threads, and the machine is shared."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
