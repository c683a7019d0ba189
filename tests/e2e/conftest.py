from collections.abc import Iterator
from pathlib import Path

import pytest

from stoker.runtime.local import LocalStack
from tests.e2e.apps import write_apps


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory, smollm2_store_url: str) -> Iterator[LocalStack]:
    """One running `stoker up` with a chat model and Python functions, all asleep."""
    folder = tmp_path_factory.mktemp("stack")
    with LocalStack(folder / "data") as stack:
        for app in write_apps(folder, smollm2_store_url):
            stack.deploy(app)
        yield stack


@pytest.fixture
def app_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "apps"
    folder.mkdir()
    return folder
