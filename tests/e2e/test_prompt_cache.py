"""A function that slept wakes with the prompts that its requests have in common already computed."""

import time
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from benchmarks.models import SHAPES, random_model
from stoker.coldstart.store import open_store
from stoker.runtime.local import LocalStack
from stoker.runtime.publishing import push_model
from stoker.runtime.stored_prompts import object_key
from tests.e2e.apps import write_chat

pytestmark = pytest.mark.xdist_group("parked")

# Between two requests of one life there is less, also on a busy machine.
IDLE_S = 3.0
KEY = object_key("chat")
SYSTEM = " ".join(f"w{1 + i % 400}" for i in range(1000))
SHARED = 992
"""Of these tokens, those in whole blocks."""
# Large enough for a prompt to take a good part of a second: requests wait no longer for what is kept.
SHAPE = {
    **SHAPES["tiny"],
    "num_hidden_layers": 4,
    "hidden_size": 512,
    "num_attention_heads": 8,
    "intermediate_size": 2048,
}


class Said(NamedTuple):
    text: str
    cached: int
    phases: dict[str, dict[str, Any]]


def ask(stack: LocalStack, question: str) -> Said:
    body = {"model": "chat", "prompt": f"{SYSTEM} {question}", "max_tokens": 6, "temperature": 0}
    response = httpx.post(f"{stack.url}/v1/completions", json=body, timeout=120)
    assert response.status_code == 200, response.text
    usage = response.json()["usage"]
    with stack.client() as client:
        job: dict[str, Any] = client.job(response.headers["x-job-id"])
    phases = {phase["name"]: phase for phase in job["timeline"]}
    return Said(response.json()["choices"][0]["text"], usage["prompt_tokens_details"]["cached_tokens"], phases)


def fall_asleep(stack: LocalStack) -> None:
    """Call it soon after an answer: what a gateway shows is a moment old."""
    with stack.client() as client:
        for awake in (True, False):
            deadline = time.monotonic() + 60
            while any(row["replicas"] for row in client.functions()) != awake:
                assert time.monotonic() < deadline, "the worker did not go to sleep"
                time.sleep(0.02)


def log_of(stack: LocalStack) -> str:
    return (stack.data_dir / "up.log").read_text() + "".join(
        path.read_text(errors="replace") for path in (stack.data_dir / "logs").glob("*.log")
    )


@pytest.fixture
def weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setitem(SHAPES, "middling", SHAPE)
    url = (tmp_path / "models").as_uri()
    push_model(random_model("middling", tmp_path / "middling"), url)
    return url


@pytest.mark.parametrize("park_s", ["0", "60"], ids=["asleep", "parked"])
def test_the_first_answer_after_waking_finds_the_system_prompt(tmp_path: Path, weights: str, park_s: str) -> None:
    with LocalStack(tmp_path / "data", env={"STOKER_PARK_S": park_s}) as stack:
        store = open_store(stack.store_url)
        stack.deploy(write_chat(tmp_path, weights, idle=IDLE_S))
        first = ask(stack, "w1 w2")
        assert first.cached == 0 and "fetch prompts" not in first.phases
        assert ask(stack, "w3 w4").cached == SHARED
        fall_asleep(stack)
        assert store.stat(KEY).size > SHARED * 4
        woken = ask(stack, "w5 w6")
        assert woken.cached == SHARED and woken.phases["restore prompts"]["facts"]["blocks"] == SHARED // 16
        assert ask(stack, "w1 w2").text == first.text
        fall_asleep(stack)
        damaged = bytearray(store.read(KEY))
        damaged[len(damaged) // 2] ^= 1
        store.write(KEY, bytes(damaged))
        again = ask(stack, "w5 w6")
        assert (again.text, again.cached) == (woken.text, 0), "a damaged object is never used"
        assert "are not used: it is damaged" in log_of(stack)


def test_what_was_kept_serves_one_model_whatever_its_functions_version(tmp_path: Path, weights: str) -> None:
    with LocalStack(tmp_path / "data") as stack:
        store = open_store(stack.store_url)
        app = write_chat(tmp_path, weights, idle=IDLE_S)
        stack.deploy(app)
        for question in ("w1 w2", "w3 w4"):
            ask(stack, question)
        fall_asleep(stack)
        before = store.read(KEY)
        stack.deploy(write_chat(tmp_path, weights, idle=IDLE_S, name="again.py"))
        assert ask(stack, "w5 w6").cached == SHARED, "another version with the same model"
        app.write_text(app.read_text().replace("max_model_len=2048", "max_model_len=1024"))
        stack.deploy(app)
        while (said := ask(stack, "w5 w6")).cached == SHARED:
            time.sleep(0.1)
        assert said.cached == 0 and "restore prompts" not in said.phases
        assert store.read(KEY) == before, "a replica that gives way to another model keeps nothing"
        ask(stack, "w7 w8")
        fall_asleep(stack)
        assert store.read(KEY) != before
        assert ask(stack, "w9 w1").cached == SHARED


def test_an_operator_may_keep_none(tmp_path: Path, weights: str) -> None:
    with LocalStack(tmp_path / "data", env={"STOKER_PROMPT_CACHE_MB": "0"}) as stack:
        stack.deploy(write_chat(tmp_path, weights, idle=IDLE_S))
        for question in ("w1 w2", "w3 w4"):
            ask(stack, question)
        fall_asleep(stack)
        assert list(open_store(stack.store_url).list("prompt-cache/")) == []
        assert ask(stack, "w5 w6").cached == 0
