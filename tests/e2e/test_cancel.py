"""A language model's job that is cancelled, or whose client leaves, at any moment: the engine stops, and the record
says what was produced and charged."""

import asyncio
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from stoker.queue.client import connect
from stoker.queue.cluster import Cluster
from stoker.runtime.local import LocalStack

pytestmark = [pytest.mark.real_model, pytest.mark.xdist_group("e2e")]

TOKENS = 24
BODY = {"prompt": "A story about the sea, told by a gull:", "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
# The news of a job's end reaches the engine by way of the agent, while the engine computes; a step takes tens of
# milliseconds here.
STEPS_TO_HEAR = 4


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory, smollm2_store_url: str) -> Iterator[LocalStack]:
    data, url = tmp_path_factory.mktemp("cancel") / "data", smollm2_store_url
    with LocalStack(data) as stack, httpx.Client(base_url=stack.url, timeout=60) as http:
        options = {"kind": "llm", "weights": url, "scaling": {"idle_timeout_s": 600}, "model": {"prefix_cache": False}}
        http.put("/v1/functions/chat", json={"spec": options}).raise_for_status()
        http.put("/v1/prices/chat", json={"prompt_tokens": 1.0, "completion_tokens": 1.0}).raise_for_status()
        read_some(http, 10 * TOKENS)
        yield stack


@pytest.fixture(scope="module")
def http(stack: LocalStack) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=stack.url, timeout=60) as http:
        yield http


@dataclass
class Seen:
    job_id: str
    tokens: int


def read_some(http: httpx.Client, most: int, *, cancel: bool = False) -> Seen:
    """Follows a streamed call until it has shown `most` tokens, and leaves, or cancels and reads on to the end."""
    headers = {"accept": "text/event-stream"}
    with http.stream("POST", "/v1/functions/chat", json=BODY, headers=headers) as response:
        seen = Seen(response.headers["x-job-id"], 0)
        for line in response.iter_lines():
            if seen.tokens >= most and not cancel:
                return seen
            if seen.tokens >= most and cancel:
                cancel, most = False, 10 * TOKENS
                http.delete(f"/v1/jobs/{seen.job_id}").raise_for_status()
            if line.startswith("data: ") and "ids" in (event := json.loads(line[6:])):
                seen.tokens += len(event["ids"])
    return seen


def settled(http: httpx.Client, job_id: str) -> dict[str, Any]:
    """The record once what the job had used is on it."""
    deadline = time.monotonic() + 60
    while True:
        job = http.get(f"/v1/jobs/{job_id}").json()
        if job["state"] == "succeeded" or (job["state"] == "cancelled" and (job["usage"] or not job["attempts"])):
            return job
        assert time.monotonic() < deadline, job
        time.sleep(0.02)


def kept_tokens(http: httpx.Client, job_id: str) -> int:
    """Of the chunks that were kept for whoever follows the job."""
    text = http.get(f"/v1/jobs/{job_id}/events").text
    lines = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
    return sum(len(event.get("ids", ())) for event in map(json.loads, lines) if isinstance(event, dict))


async def engine_stats(stack: LocalStack) -> dict[str, int]:
    client = connect(stack.redis_url)
    hosts = await Cluster(client).hosts()
    await client.aclose()
    (stats,) = [each["engine"] for host in hosts.values() for each in host.body["replicas"].values() if each["engine"]]
    return stats


def idle_stats(stack: LocalStack) -> dict[str, int]:
    """Reported twice, the same: nothing is computed any more."""
    last: dict[str, int] = {}
    deadline = time.monotonic() + 60
    while True:
        stats = asyncio.run(engine_stats(stack))
        if stats == last and stats["running"] == stats["waiting"] == stats["used_blocks"] == 0:
            return stats
        assert time.monotonic() < deadline, stats
        last = stats
        time.sleep(1.1)


def check(job: dict[str, Any], spent: int, kept: int, seen: int) -> None:
    usage = job["usage"] or {"prompt_tokens": 0, "completion_tokens": 0}
    produced = usage["completion_tokens"]
    assert seen <= kept <= produced <= TOKENS
    assert job["cost_usd"] == pytest.approx((usage["prompt_tokens"] + produced) / 1e6, abs=2e-6)
    if job["state"] == "cancelled":
        assert job["attempts"] == [] or job["attempts"][-1]["ended"] == "cancelled"
        assert produced < TOKENS
    # An answer's last token is never computed on.
    known = usage["prompt_tokens"] + max(0, produced - 1)
    assert spent <= known + STEPS_TO_HEAR, (spent, usage)
    assert not produced or spent >= known, (spent, usage)


def leave_after(stack: LocalStack, http: httpx.Client, moment: int, way: str, computed: int) -> int:
    """How much the engine has computed afterwards; before it was `computed`."""
    seen = read_some(http, moment, cancel=way == "cancel")
    job = settled(http, seen.job_id)
    after = idle_stats(stack)["computed_tokens"]
    assert (job["state"] == "succeeded") == (job["usage"] is not None and job["usage"]["completion_tokens"] == TOKENS)
    assert job["state"] == "cancelled" or moment > TOKENS // 3
    check(job, after - computed, kept_tokens(http, seen.job_id), seen.tokens)
    return after


def test_at_any_moment(stack: LocalStack, http: httpx.Client) -> None:
    """Before the first token (0), in the middle, just before the end, behind it."""
    computed = idle_stats(stack)["computed_tokens"]

    @settings(max_examples=10, deadline=None, derandomize=True, database=None)
    @example(0, "leave")
    @example(0, "cancel")
    @example(1, "leave")
    @example(TOKENS - 1, "leave")
    @example(TOKENS, "cancel")
    @given(st.integers(0, TOKENS), st.sampled_from(["leave", "cancel"]))
    def run(moment: int, way: str) -> None:
        nonlocal computed
        computed = leave_after(stack, http, moment, way, computed)

    run()
