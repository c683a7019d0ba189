from collections.abc import Iterator
from pathlib import Path

import pytest

from stoker.runtime.local import LocalStack
from tests.e2e.apps import write_chat, write_tools


@pytest.fixture
def stack(tmp_path: Path, smollm2_store_url: str) -> Iterator[LocalStack]:
    """A `stoker up` of this test's own, because parts of it will be killed."""
    with LocalStack(tmp_path / "data", env={"STOKER_LEASE_MS": "1500"}) as stack:
        stack.deploy(write_chat(tmp_path, smollm2_store_url))
        stack.deploy(write_tools(tmp_path))
        yield stack
