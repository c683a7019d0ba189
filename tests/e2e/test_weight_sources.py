"""Models from a bucket through the whole stack: the second start finds the weights on this host's disk, and a model
that nobody published loads as well."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx

from benchmarks.models import random_model
from stoker.coldstart.s3_store import S3Store
from stoker.runtime.local import LocalStack
from stoker.runtime.publishing import push_model
from tests.e2e.apps import CHAT


def deploy(stack: LocalStack, folder: Path, name: str, weights: str) -> None:
    app = folder / f"{name}_app.py"
    app.write_text(CHAT.format(weights=weights, idle=30).replace('"chat"', f'"{name}"'))
    stack.deploy(app)


def ask(stack: LocalStack, name: str) -> tuple[str, dict[str, Any], str]:
    """The answer, what the start's fetch said about itself, and the job's id."""
    body = {"model": name, "prompt": "w1 w2 w3", "max_tokens": 6, "temperature": 0}
    answer = httpx.post(f"{stack.url}/v1/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    job = httpx.get(f"{stack.url}/v1/jobs/{answer.headers['x-job-id']}").json()
    fetch = next(phase for phase in job["timeline"] if phase["name"] == "fetch weights")
    return answer.json()["choices"][0]["text"], fetch["facts"], job["id"]


def timeline(stack: LocalStack, job_id: str, *options: str) -> str:
    command = [sys.executable, "-m", "stoker.runtime.cli", "jobs", "timeline", job_id, "--url", stack.url, *options]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


def test_weights_from_a_bucket_are_kept_and_need_no_manifest(tmp_path: Path, s3_endpoint: str) -> None:
    model = random_model("tiny", tmp_path / "tiny")
    push_model(model, "s3://models/kept")
    plain = S3Store("models", "plain")
    for path in model.iterdir():
        plain.write(path.name, path)
    with LocalStack(tmp_path / "data") as stack:
        for name, place in (("first", "kept"), ("again", "kept"), ("unpublished", "plain")):
            deploy(stack, tmp_path, name, f"s3://models/{place}")
        text, facts, job_id = ask(stack, "first")
        assert set(facts["sources"]) == {"store"} and facts["checked"] == "checksum of every chunk"
        assert (tmp_path / "data" / "chunks").is_dir()
        shown = timeline(stack, job_id)
        assert "fetch weights" in shown and "held up most by" in shown
        timeline(stack, job_id, "--trace", str(tmp_path / "trace.json"))
        events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
        assert {"queue wait", "fetch weights", "run"} <= {event["name"] for event in events}
        again, facts, _ = ask(stack, "again")
        assert set(facts["sources"]) == {"cache"} and again == text
        unpublished, facts, _ = ask(stack, "unpublished")
        assert facts["checked"] == "length and version" and unpublished == text
