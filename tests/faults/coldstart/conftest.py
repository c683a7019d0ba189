"""The cold start room's fixtures: a small published model, and an S3 endpoint that breaks its promises."""

import threading
from collections.abc import Iterator

import pytest

from tests.coldstart.conftest import certificate, fault_server, one_thread, published, tls_server, write_model

__all__ = ["certificate", "fault_server", "one_thread", "published", "tls_server", "write_model"]


@pytest.fixture(autouse=True)
def no_thread_left() -> Iterator[None]:
    yield
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("stoker-fetch")]
