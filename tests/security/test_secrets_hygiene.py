"""Rows 9 and 17: a prompt is in its own answers only, a key nowhere. Canaries go through a whole `stoker up`; then its
files, and everything that others may read, are searched for them."""

import hashlib
import json
import re
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from .belongings import bundle
from .conftest import KeyedStack

pytestmark = pytest.mark.xdist_group("keyed_stack")

CANARY = "canary-prompt-c0ffee"
ADDRESS = re.compile(r"0x[0-9a-f]{8,16}")
CHAT = "/v1/chat/completions"
CODE = """
import time
def quiet(x): return [x]
def loud(x): raise ValueError("went wrong")
def dying(x):
    import os
    os._exit(3)
"""


@pytest.fixture(scope="module")
def visited(keyed_stack: KeyedStack) -> KeyedStack:
    """After requests of every kind that carry the canary: good ones, bad ones and failing ones."""
    ann = keyed_stack.tenant("ann")
    deploy_functions(ann)
    said = {"model": "chat", "messages": [{"role": "user", "content": f"w1 {CANARY} w2"}], "max_tokens": 3}
    assert ann.post(CHAT, json=said).status_code == 200
    assert ann.post(CHAT, json={**said, "stream": True}).status_code == 200
    assert ann.post("/v1/functions/quiet", json={"secret": CANARY}).status_code == 200
    assert ann.post("/v1/functions/loud", json={"secret": CANARY}).status_code == 500
    assert ann.post("/v1/functions/dying", json={"secret": CANARY}, timeout=120).status_code >= 500
    for refused in malformed(said):
        assert 400 <= ann.post(CHAT, **refused).status_code < 500, refused
    line = json.dumps({"custom_id": "1", "method": "POST", "url": CHAT, "body": said}) + "\n{" + CANARY
    sent = ann.post("/v1/files", data={"purpose": "batch"}, files={"file": ("in.jsonl", line.encode())}).json()
    batch = ann.post("/v1/batches", json={"endpoint": CHAT, "input_file_id": sent["id"]}).json()
    while batch["status"] != "completed":
        time.sleep(0.05)
        batch = ann.get(f"/v1/batches/{batch['id']}").json()
    return keyed_stack


def deploy_functions(client: httpx.Client) -> None:
    data = bundle(CODE)
    digest = hashlib.sha256(data).hexdigest()
    assert client.put(f"/v1/bundles/{digest}", content=data).status_code == 201
    functions = [
        {"name": name, "kind": "python", "code": digest, "entry": f"m:{name}"} for name in ("quiet", "loud", "dying")
    ]
    functions[2]["limits"] = {"max_attempts": 1}
    assert client.put("/v1/apps/canary", json={"functions": functions}).status_code == 200


def malformed(said: dict[str, Any]) -> list[dict[str, Any]]:
    bodies = [
        {**said, "temperature": CANARY},
        {**said, "messages": CANARY},
        {**said, "messages": [{"role": "user", "content": {"x": CANARY}}]},
        {**said, "max_tokens": 10**9},
        {**said, "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "never"}}}},
        {**said, "stop": [CANARY] * 9},
    ]
    return [{"json": body} for body in bodies] + [{"content": f'{{"model": "chat", "x": "{CANARY}'.encode()}]


def logs(data: Path) -> list[Path]:
    """Everything that `stoker up` and its children write, but the queue's and the store's own contents."""
    return [path for path in data.rglob("*") if path.is_file() and "log" in path.name]


def test_no_log_has_a_prompt_or_a_key(visited: KeyedStack) -> None:
    files = logs(visited.stack.data_dir)
    assert any("gateway" in path.name for path in files) and sum(path.stat().st_size for path in files)
    for path in files:
        text = path.read_text(errors="replace")
        assert CANARY not in text, path
        for key in [*visited.keys.values(), visited.root.headers["authorization"].split()[1]]:
            assert key[-43:] not in text, path


def test_no_file_at_all_has_a_key(visited: KeyedStack) -> None:
    """The queue's files and the object store included; the deployment's own secret is one file, its owner's only."""
    secret = visited.stack.data_dir / "secret"
    assert secret.stat().st_mode & 0o077 == 0
    for path in visited.stack.data_dir.rglob("*"):
        if path.is_file() and not path.is_symlink():
            data = path.read_bytes()
            for key in visited.keys.values():
                assert key[-43:].encode() not in data, path
            assert path == secret or secret.read_bytes().strip() not in data, path


def test_nothing_that_others_read_has_a_prompt_or_a_key(visited: KeyedStack) -> None:
    bob, said = visited.tenant("bob"), ""
    for client in (bob, visited.root):
        for path in ("/metrics", "/v1/functions", "/v1/hosts", "/v1/usage?tenant=*", "/", "/v1/tenants", "/v1/models"):
            said += client.get(path).text
    said += visited.root.get("/v1/tenants/ann/keys").text
    assert "chat" in said and CANARY not in said
    assert not [key for key in visited.keys.values() if key[-43:] in said]


def test_errors_repeat_neither_prompts_nor_keys_nor_addresses(visited: KeyedStack) -> None:
    ann = visited.tenant("ann")
    said = {"model": "chat", "messages": [{"role": "user", "content": CANARY}], "max_tokens": 3}
    answers = [ann.post(CHAT, **refused) for refused in malformed(said)]
    answers += [ann.post("/v1/functions/loud", json={"secret": CANARY})]
    answers += [visited.client(visited.keys["ann"][:-1] + "_").get("/v1/models")]
    answers += [ann.get(f"/v1/jobs/{CANARY}x", headers={"last-event-id": "0x7f0000000000"})]
    for answer in answers[:-1]:
        assert answer.status_code >= 400
        assert CANARY not in answer.text, answer.text
    for answer in answers:
        assert not ADDRESS.search(answer.text.replace("0x7f0000000000", "")), answer.text
        assert visited.keys["ann"][-43:] not in answer.text
