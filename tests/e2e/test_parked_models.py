"""A model that nobody asks for is parked in host memory; the next request finds it there, its engine process alive."""

import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.models import random_model
from stoker.runtime.local import LocalStack
from stoker.runtime.publishing import push_model
from tests.e2e.apps import write_chat

pytestmark = pytest.mark.xdist_group("parked")


def ask(stack: LocalStack) -> tuple[str, set[str]]:
    """The answer, and the phases of the job's timeline."""
    body = {"model": "chat", "prompt": "w1 w2 w3", "max_tokens": 6, "temperature": 0}
    response = httpx.post(f"{stack.url}/v1/completions", json=body, timeout=120)
    assert response.status_code == 200, response.text
    with stack.client() as client:
        job: dict[str, Any] = client.job(response.headers["x-job-id"])
    return response.json()["choices"][0]["text"], {phase["name"] for phase in job["timeline"]}


def fall_asleep(stack: LocalStack) -> None:
    with stack.client() as client:
        deadline = time.monotonic() + 60
        while any(row["replicas"] for row in client.functions()):
            assert time.monotonic() < deadline, "the worker did not go to sleep"
            time.sleep(0.02)


@pytest.mark.parametrize(("park_s", "is_kept"), [("60", True), ("0", False)])
def test_a_parked_model_answers_without_a_load(tmp_path: Path, park_s: str, is_kept: bool) -> None:
    model = random_model("tiny", tmp_path / "tiny")
    push_model(model, (tmp_path / "store").as_uri())
    with LocalStack(tmp_path / "data", env={"STOKER_PARK_S": park_s}) as stack:
        stack.deploy(write_chat(tmp_path, (tmp_path / "store").as_uri(), idle=0.3))
        first, phases = ask(stack)
        assert {"engine process start", "documents"} <= phases
        fall_asleep(stack)
        again, phases = ask(stack)
    assert again == first != ""
    assert ("engine process start" not in phases) == is_kept
    assert "upload weights" in phases
