"""The examples as a user runs them: deploy the file, then run it."""

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from examples import demo, publish
from stoker.runtime.client.client import Client
from stoker.runtime.local import LocalStack
from stoker.runtime.publishing import push_model

pytestmark = [pytest.mark.real_model, pytest.mark.xdist_group("examples")]

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
ENVIRONMENT = {"STOKER_SECRET": "a secret of at least thirty-two characters", "STOKER_WEBHOOK_ALLOW": "127.0.0.0/8"}
RUN_S = 150

Run = Callable[..., str]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, smollm2_store_url: str, minilm_dir: Path) -> str:
    folder = tmp_path_factory.mktemp("models")
    (folder / "smollm2").symlink_to(smollm2_store_url.removeprefix("file://"))
    push_model(minilm_dir, f"{folder.as_uri()}/minilm")
    return folder.as_uri()


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStack]:
    with LocalStack(tmp_path_factory.mktemp("examples") / "data", env=ENVIRONMENT) as stack:
        yield stack


@pytest.fixture
def run(stack: LocalStack, models: str, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setenv("MODELS", models)

    def run(name: str, *arguments: str) -> str:
        """Deploys the example, runs it as a program, and returns what it printed."""
        if name != "webhook":
            stack.deploy(EXAMPLES / f"{name}.py")
        command = [sys.executable, str(EXAMPLES / f"{name}.py"), *arguments]
        done = subprocess.run(
            command, env={**os.environ, "STOKER_URL": stack.url}, capture_output=True, text=True, timeout=RUN_S
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def test_search_finds_by_meaning(run: Run) -> None:
    first, *_ = run("search").splitlines()
    assert first.endswith("Refunds are paid within five days after the parcel has come back to us.")
    assert "password" in run("search", "I can't log in any more").splitlines()[0]


def test_digits_are_read(run: Run) -> None:
    assert float(re.search(r"\((.*)%\)", run("digits"))[1]) > 95  # type: ignore[index]


def test_reviews_are_judged(run: Run) -> None:
    assert [line.split()[0] for line in run("sentiment").splitlines()] == ["good", "bad", "good"]


def test_the_assistants_long_prompt_is_computed_once(run: Run) -> None:
    told = re.findall(r"after (.*) s, (\d+) of (\d+) tokens cached", run("assistant"))
    times, cached, prompts = ([float(row[place]) for row in told] for place in range(3))
    assert cached[0] == 0 and min(cached[1:]) > 0.9 * prompts[0]
    assert min(times[1:]) < times[0] / 2


def test_documents_go_in_and_answers_come_out(run: Run, tmp_path: Path) -> None:
    out = tmp_path / "answers.jsonl"
    assert "invoice-17: " in run("documents", str(out))
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert {line["custom_id"] for line in lines} == {"invoice-17", "letter-4", "note-9"}
    assert all(line["response"]["status_code"] == 200 for line in lines)


def test_the_router_sends_each_question_where_it_belongs(run: Run, stack: LocalStack) -> None:
    run("router")
    # The first one woke the embedding model, for longer than a request waits for it.
    look_up, advice, hard = [line.strip() for line in run("router").splitlines() if "reason=" in line]
    assert re.fullmatch(r"small; reason=examples; score=0\.\d+", look_up)
    assert re.fullmatch(r"large; reason=examples; score=0\.\d+", advice)
    assert hard == "large; reason=rule"
    body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4, "metadata": {"kind": "order-status"}}
    with stack.client() as client:
        job = client.spawn("concierge", body, key="one")
        assert job.get()["usage"]["completion_tokens"] > 0
        record = job.status()
        again = client.request("GET", "/v1/functions/concierge/jobs/one")
    assert (record["function"], again["id"]) == ("small", job.id)
    assert record["route"] == {
        "router": "concierge",
        "target": "small",
        "reason": "rule",
        "detail": "metadata",
        "score": None,
        "instead_of": "",
        "because": "",
    }


def test_a_webhooks_consumer_believes_what_is_signed(run: Run, stack: LocalStack) -> None:
    stack.deploy(EXAMPLES / "sentiment.py")
    assert re.fullmatch(r"job\.succeeded: sentiment-\w+ says good\n", run("webhook"))


def test_the_models_of_the_examples_are_published_once(
    tmp_path: Path, smollm2_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(publish, "model_source", lambda: smollm2_dir)
    publish.main(tmp_path.as_uri())
    sizes = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
    publish.main(tmp_path.as_uri())
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()} == sizes
    assert capsys.readouterr().out.splitlines() == [f"{tmp_path.as_uri()}/{name}" for name in ("minilm", "smollm2")] * 2


def test_the_demo_calls_where_callers_need_a_key(
    tmp_path: Path, smollm2_store_url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CHAT_WEIGHTS", smollm2_store_url)
    monkeypatch.setattr(demo, "DATA", tmp_path / "data")
    with LocalStack(tmp_path / "data", env={"STOKER_AUTH": "keys"}) as stack, stack.client() as client:
        stack.deploy(EXAMPLES / "chat.py")
        demo.show_how_to_call(stack)
        assert client.job(demo.ask(stack, demo.QUESTION))["state"] == "succeeded"
        said = capsys.readouterr().out
        (offered,) = re.findall(r'export STOKER_API_KEY="\$\(stoker (.*)\)"', said)
        command = [sys.executable, "-m", "stoker.runtime.cli", *shlex.split(offered)]
        key = subprocess.check_output(command, text=True).strip()
        with Client(stack.url, key) as other:
            assert [row["name"] for row in other.functions()] == ["smollm2"]
    assert "authorization: Bearer $STOKER_API_KEY" in said and key not in said and "Paris" in said
