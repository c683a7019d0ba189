"""Rows 1 to 3: a prompt that one tenant has cached is news to another, whatever it sends, asks or measures."""

import json
import time
from array import array
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from stoker.runtime.engine.prefix import PUBLIC as PUBLIC_SALT
from stoker.runtime.engine.prefix import HashChain, root_key
from stoker.runtime.engine.request import GenerationRequest, SamplingParams
from tests.runtime.engine.conftest import TinyModel

from .conftest import KeyedStack

pytestmark = pytest.mark.xdist_group("keyed_stack")

CHAT = "/v1/chat/completions"
# What a client might try, to be taken for another tenant: none of it may matter.
SPOOFS: dict[str, Any] = {
    "cache_salt": "ann",
    "user": "ann",
    "tenant": "ann",
    "prompt_cache_key": "ann",
    "safety_identifier": "ann",
    "metadata": {"tenant": "ann"},
    "salt": "ann",
}
SPOOFED_HEADERS = {"x-tenant": "ann", "x-stoker-tenant": "ann", "x-cache-salt": "ann", "openai-organization": "ann"}

Ask = Callable[[httpx.Client, str, dict[str, Any]], int]


def prompt(number: int) -> str:
    """80 tokens, 5 blocks; the first one is different for each number."""
    return " ".join(f"w{1 + (7 * i + 41 * number) % 500}" for i in range(80))


def usage(response: httpx.Response) -> dict[str, Any]:
    assert response.status_code == 200, response.text
    return response.json()["usage"]


def cached(found: dict[str, Any]) -> int:
    return found["prompt_tokens_details"]["cached_tokens"]


def said(text: str, spoofs: dict[str, Any]) -> dict[str, Any]:
    return {"model": "chat", "messages": [{"role": "user", "content": text}], "max_tokens": 2, **spoofs}


def by_chat(client: httpx.Client, text: str, spoofs: dict[str, Any]) -> int:
    return cached(usage(client.post(CHAT, json=said(text, spoofs), headers=SPOOFED_HEADERS if spoofs else {})))


def by_stream(client: httpx.Client, text: str, spoofs: dict[str, Any]) -> int:
    body = {**said(text, spoofs), "stream": True, "stream_options": {"include_usage": True}}
    lines = client.post(CHAT, json=body).text.splitlines()
    return cached(json.loads([line for line in lines if line.startswith("data: {")][-1][6:])["usage"])


def by_completion(client: httpx.Client, text: str, spoofs: dict[str, Any]) -> int:
    body = {"model": "chat", "prompt": text, "max_tokens": 2, **spoofs}
    return cached(usage(client.post("/v1/completions", json=body)))


def by_function(client: httpx.Client, text: str, spoofs: dict[str, Any]) -> int:
    return cached(usage(client.post("/v1/functions/chat", json=said(text, spoofs))))


def by_job(client: httpx.Client, text: str, spoofs: dict[str, Any]) -> int:
    job = client.post("/v1/functions/chat/jobs", json=said(text, spoofs)).json()
    while job["state"] != "succeeded":
        assert job["state"] in ("queued", "running"), job
        time.sleep(0.02)
        job = client.get(f"/v1/jobs/{job['id']}").json()
    return job["usage"]["cached_tokens"]


def by_batch(client: httpx.Client, text: str, spoofs: dict[str, Any]) -> int:
    line = json.dumps({"custom_id": "1", "method": "POST", "url": CHAT, "body": said(text, spoofs)})
    sent = client.post("/v1/files", data={"purpose": "batch"}, files={"file": ("in.jsonl", line.encode())}).json()
    batch = client.post("/v1/batches", json={"endpoint": CHAT, "input_file_id": sent["id"]}).json()
    while batch["status"] != "completed":
        time.sleep(0.05)
        batch = client.get(f"/v1/batches/{batch['id']}").json()
    row = json.loads(client.get(f"/v1/files/{batch['output_file_id']}/content").text)
    return cached(row["response"]["body"]["usage"])


WAYS: list[Ask] = [by_chat, by_stream, by_completion, by_function, by_job, by_batch]


@pytest.mark.parametrize("ask", WAYS, ids=lambda way: way.__name__)
def test_a_cached_prompt_is_its_tenants_own(ask: Ask, keyed_stack: KeyedStack) -> None:
    ann, bob, text = keyed_stack.tenant("ann"), keyed_stack.tenant("bob"), prompt(WAYS.index(ask))
    assert ask(ann, text, {}) == 0
    assert ask(bob, text, SPOOFS) == 0
    assert ask(keyed_stack.root, text, SPOOFS) == 0
    assert ask(ann, text, {}) >= 64
    assert ask(bob, text, {}) >= 64, "what it has sent itself"


PUBLIC = " ".join(f"w{1 + (3 * i) % 490}" for i in range(50))


def test_a_prefix_declared_public_is_shared_and_what_follows_is_not(
    keyed_stack: KeyedStack, tiny_store_url: str
) -> None:
    """50 tokens are 3 blocks and a bit: the block where the public text ends is its tenant's own already."""
    spec = {"kind": "llm", "weights": tiny_store_url, "public_prefix": PUBLIC}
    assert keyed_stack.root.put("/v1/functions/welcoming", json={"spec": spec}).status_code == 201
    ann, bob = keyed_stack.tenant("ann"), keyed_stack.tenant("bob")

    def ask(client: httpx.Client, *said: str) -> int:
        messages = [{"role": role, "content": text} for role, text in zip(("system", "user"), said, strict=False)]
        body = {"model": "welcoming", "messages": messages, "max_tokens": 2}
        return cached(usage(client.post(CHAT, json=body)))

    assert ask(ann, PUBLIC, prompt(70)) == 0
    assert ask(bob, PUBLIC, prompt(70)) == 48
    assert ask(ann, PUBLIC, prompt(70)) == ask(bob, PUBLIC, prompt(70)) == 128
    assert ask(bob, PUBLIC, prompt(71)) == 48
    assert ask(bob, prompt(72), "w1") == 0
    assert by_completion(ann, PUBLIC, {"model": "welcoming"}) == 48


FIELD = st.binary(max_size=40)


@given(ours=st.tuples(FIELD, FIELD, FIELD), theirs=st.tuples(FIELD, FIELD, FIELD))
@example(ours=(b"m", b"d", b"org_12345"), theirs=(b"m", b"dorg_1", b"2345"))
@example(ours=(b"m", b"d", b"org_1"), theirs=(b"m", b"d", b"org_12345"))
@example(ours=(b"", b"", b"modeldtypesalt"), theirs=(b"model", b"dtype", b"salt"))
@example(ours=(b"m", b"salt\x05\0\0\0\0\0\0\0ann", b""), theirs=(b"m", b"", b"ann"))
def test_no_two_namespaces_run_together(ours: tuple[bytes, bytes, bytes], theirs: tuple[bytes, bytes, bytes]) -> None:
    """Row 2, over model, dtype and tenant: full SHA-256 of tagged fields with their lengths."""
    assert (root_key(*ours) == root_key(*theirs)) == (ours == theirs)
    assert len(root_key(*ours)) == 32


def generation(name: str, salt: bytes, tokens: list[int]) -> GenerationRequest:
    params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    return GenerationRequest(name, tokens, params, cache_salt=salt)


@pytest.mark.parametrize("tier", [0, 1 << 20], ids=["device", "with host tier"])
def test_another_tenants_cache_changes_no_step(tier: int) -> None:
    """Row 3, and stronger than a measurement of times: what is computed for B, step by step, is the same whether A has
    cached the prompt or not. Half of the prompts are A's; two tiers."""
    model, prompts = TinyModel.random(), [[(11 * i + 7 * n) % 97 for i in range(64)] for n in range(8)]
    steps: dict[str, list[list[list[int]]]] = {"cached": [], "unseen": []}
    for number, tokens in enumerate(prompts):
        engine = model.engine(num_blocks=16, host_cache_bytes=tier)
        warmed, other = generation("a", b"ann", tokens), generation("b", b"bob", tokens)
        elsewhere = generation("a", b"ann", [96 - token for token in tokens])
        engine.generate([warmed if number % 2 == 0 else elsewhere])
        engine.submit(other)
        seen = []
        while engine.has_work():
            before = engine.stats()["computed_tokens"]
            deltas = engine.step()
            seen.append([engine.stats()["computed_tokens"] - before, *(delta.cached_tokens for delta in deltas)])
        steps["cached" if number % 2 == 0 else "unseen"].append(seen)
    assert steps["cached"] == steps["unseen"]
    assert sum(counts[0] for counts in steps["cached"][0]) == 64 + 3


def test_public_blocks_are_common_and_those_behind_them_follow_from_both() -> None:
    tokens, public = array("i", [i % 97 for i in range(96)]), root_key(b"m", b"d", PUBLIC_SALT)
    roots = [root_key(b"m", b"d", salt) for salt in (b"ann", b"bob")]
    ann, bob = ([HashChain(root, tokens, public, 2).key(index) for index in range(6)] for root in roots)
    assert ann[:2] == bob[:2] and not set(ann[2:]) & set(bob[2:])
    assert ann[:2] == [HashChain(public, tokens).key(index) for index in range(2)]
    private = [HashChain(root, tokens).key(index) for root in (*roots, public) for index in range(6)]
    assert not set(ann[2:]) & set(private)


def test_a_tenants_chain_leads_to_nobody_elses_blocks() -> None:
    tokens = [i % 97 for i in range(64)]
    chains = [HashChain(root_key(b"m", b"d", salt), array("i", tokens)) for salt in (b"ann", b"bob", b"")]
    keys = [chain.key(index) for chain in chains for index in range(4)]
    assert len(set(keys)) == len(keys)
