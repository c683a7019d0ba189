"""A batch beside interactive requests: gateway and worker are killed in its middle, every line has its one row, in its
place, and those who wait for an answer notice next to nothing of it. `benchmarks.batches` does it with 10,000 lines."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from benchmarks.batches import BatchRun, body, counted, interactive
from benchmarks.report import percentile
from stoker.runtime.local import LocalStack
from tests.e2e.apps import write_chat

from .test_kills import kill, leftovers, until

pytestmark = pytest.mark.xdist_group("faults")

LINES = int(os.environ.get("STOKER_BATCH_LINES", "1000"))
TOKENS = 32
# `benchmarks.batches` measures; here other tests share the cores.
REQUESTS, ROUNDS, MOST = 30, 4, 3.0


@pytest.fixture
def tiny_stack(tmp_path: Path, tiny_store_url: str) -> Iterator[LocalStack]:
    with LocalStack(tmp_path / "data", env={"STOKER_LEASE_MS": "1500"}) as stack:
        stack.deploy(write_chat(tmp_path, tiny_store_url))
        yield stack


def answers(stack: LocalStack) -> bool:
    try:
        return httpx.get(f"{stack.url}/readyz").status_code == 200
    except httpx.HTTPError:
        return False


@pytest.mark.timeout(600)
def test_a_batch_survives_kills_and_yields(tiny_stack: LocalStack) -> None:
    """Of the time of interactive requests, medians are compared, and the best of some rounds counts: neighbours on the
    machine slow requests down too. The far end of it is what `benchmarks.batches` measures on a quiet machine."""
    seeds = iter(range(10**6, 10**7))
    with httpx.Client(base_url=tiny_stack.url, timeout=120) as client:
        interactive(client, "chat", seeds, counted(10))
        alone = [median(interactive(client, "chat", seeds, counted(REQUESTS))) for _ in range(2)]
        batch = BatchRun(client, "chat", LINES, TOKENS)
        batch.start()
        until(lambda: batch.look() or batch.answer.get("status") == "in_progress", "the batch to begin")
        time.sleep(1.5)
        kill(tiny_stack, "stoker.runtime.cli gateway")
        kill(tiny_stack, "worker --host-id")
        until(lambda: answers(tiny_stack), "the gateway to be back")
        interactive(client, "chat", seeds, counted(10))
        assert not batch.look(), "too few lines to be killed in their middle"
        beside: list[float] = []
        while len(beside) < ROUNDS and not batch.look() and min([9.0, *beside]) > MOST * min(alone):
            beside.append(median(interactive(client, "chat", seeds, counted(REQUESTS))))
        assert min(beside) <= MOST * min(alone), (beside, alone)
        batch.wait()
        output = batch.check()
        for row in output[:: len(output) // 5]:
            asked = body("chat", int(row["custom_id"].removeprefix("line-")), TOKENS)
            alone_text = client.post("/v1/chat/completions", json=asked).json()["choices"][0]["message"]["content"]
            assert row["response"]["body"]["choices"][0]["message"]["content"] == alone_text
    zero = {"queued": 0, "running": 0, "delayed": 0, "used_blocks": 0}
    until(lambda: leftovers(tiny_stack) == zero, "nothing to be left")


def median(times: list[tuple[float, float]]) -> float:
    return percentile([whole for _, whole in times], 0.5)
