"""Row 13: a tenant that floods a shared model a hundredfold delays another's first token by little, and takes neither
its place nor its cached prompt. The operator says how much of a model one tenant may have at once: a quarter, here.
How little is little on the device, step by step: `tests/runtime/pool/test_noisy_tenant.py`."""

import time
from typing import Any

import httpx
import pytest

from benchmarks.report import percentile

from .conftest import KeyedStack
from .test_cache_isolation import cached, prompt, said, usage

pytestmark = pytest.mark.xdist_group("keyed_stack")

FLOOD, REQUESTS, MOST_RUNNING = 100, 10, 4


def first_token_s(client: httpx.Client, number: int) -> float:
    body = {"model": "crowded", "messages": [{"role": "user", "content": prompt(number)}], "max_tokens": 8}
    began = time.perf_counter()
    with client.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as response:
        assert response.status_code == 200
        found = 0.0
        for line in response.iter_lines():
            found = found or (time.perf_counter() - began) * ('"content"' in line)
    return found


def cached_tokens(client: httpx.Client) -> int:
    return cached(usage(client.post("/v1/chat/completions", json={**said(prompt(77), {}), "model": "crowded"})))


@pytest.fixture
def crowded(keyed_stack: KeyedStack, tiny_store_url: str) -> KeyedStack:
    spec = {
        "kind": "llm",
        "weights": tiny_store_url,
        "model": {"max_seqs": 16},
        "limits": {"max_running_per_tenant": MOST_RUNNING},
    }
    assert keyed_stack.root.put("/v1/functions/crowded", json={"spec": spec}).status_code in (200, 201)
    return keyed_stack


def looked_up(client: httpx.Client, ids: list[str]) -> list[dict[str, Any]]:
    return [client.get(f"/v1/jobs/{id}").json() for id in ids]


def test_a_flood_delays_others_by_little(crowded: KeyedStack) -> None:
    """Little: the median is a small part of one of the flood's jobs, of which more than eighty wait all the time and
    four run at once. A slow or busy machine makes both longer."""
    ann, bob = crowded.tenant("ann"), crowded.tenant("bob")
    first_token_s(bob, 1000)
    assert cached_tokens(bob) == 0
    body = {"messages": [{"role": "user", "content": prompt(1)}], "max_tokens": 400}
    jobs = [ann.post("/v1/functions/crowded/jobs", json=body).json()["id"] for _ in range(FLOOD)]
    running: list[int] = []
    beside: list[float] = []
    numbers = iter(range(2000, 10**6))
    first: dict[str, Any] = {"finished_at": None}
    while len(beside) < REQUESTS or not first["finished_at"]:
        beside.append(first_token_s(bob, next(numbers)))
        running.append(crowded.root.get("/v1/functions/crowded").json()["running"])
        (first,) = looked_up(ann, jobs[:1])
    assert first["state"] == "succeeded"
    assert [job["state"] for job in looked_up(ann, jobs)].count("queued") > 80
    assert MOST_RUNNING <= max(running) <= MOST_RUNNING + 1, "and one of the other's"
    assert cached_tokens(bob) >= 64
    for job in jobs:
        ann.delete(f"/v1/jobs/{job}")
    job_s = first["finished_at"] - first["started_at"]
    assert percentile(beside, 0.5) < job_s / 10, (beside, job_s)


def test_a_flood_in_all_places_makes_room(keyed_stack: KeyedStack, tiny_store_url: str) -> None:
    """No limit is set. The other's request is answered before any of the flood's is, however slow the machine."""
    spec = {"kind": "llm", "weights": tiny_store_url, "model": {"max_seqs": 4}}
    assert keyed_stack.root.put("/v1/functions/full", json={"spec": spec}).status_code in (200, 201)
    ann, bob = keyed_stack.tenant("ann"), keyed_stack.tenant("bob")
    body = {"model": "full", "messages": [{"role": "user", "content": prompt(1)}], "max_tokens": 8}
    assert bob.post("/v1/chat/completions", json=body).status_code == 200
    body = {"messages": [{"role": "user", "content": prompt(1)}], "max_tokens": 1800}
    jobs = [ann.post("/v1/functions/full/jobs", json=body).json()["id"] for _ in range(12)]
    while keyed_stack.root.get("/v1/functions/full").json()["running"] < 4:
        time.sleep(0.01)
    answer = bob.post("/v1/functions/full", json={**body, "max_tokens": 8})
    states = [job["state"] for job in looked_up(ann, jobs)]
    for job in jobs:
        ann.delete(f"/v1/jobs/{job}")
    assert answer.status_code == 200
    assert states == ["running"] * 4 + ["queued"] * 8
