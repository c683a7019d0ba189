"""`stoker down` while calls run: it says what it waits for, every caller is answered, and no job is lost."""

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import httpx

from stoker.runtime.local import LocalStack
from tests.e2e.test_moment_of_a_deploy import until

APP = """
import os, time
import stoker

app = stoker.App("going")

@app.function(concurrency=8)
def work(go):
    while not os.path.exists(go):
        time.sleep(0.02)
    return "done"
"""


def call(url: str, go: Path, headers: dict[str, str], answers: dict[str, Any], name: str) -> None:
    try:
        answers[name] = httpx.post(f"{url}/v1/functions/work", json=str(go), headers=headers, timeout=120)
    except httpx.HTTPError as error:
        answers[name] = error


def test_what_runs_is_answered_and_goes_on_after_the_next_start(tmp_path: Path) -> None:
    data, never, answers = tmp_path / "data", tmp_path / "go", {}
    (tmp_path / "going_app.py").write_text(APP)
    kinds: dict[str, dict[str, str]] = {
        "plain": {},
        "patient": {"prefer": "wait=100"},
        "keyed": {"idempotency-key": "k"},
        "streamed": {"accept": "text/event-stream"},
    }
    with LocalStack(data, env={"STOKER_LEASE_MS": "60000"}) as stack:
        stack.deploy(tmp_path / "going_app.py")
        callers = [
            threading.Thread(target=call, args=(stack.url, never, headers, answers, name))
            for name, headers in kinds.items()
        ]
        for caller in callers:
            caller.start()
        with stack.client() as client:
            detached = client.spawn("work", str(never))
            until(lambda: len(running(client)) == 5, "all run")
            ids = {record["id"] for record in running(client)}
        down = subprocess.run(
            [sys.executable, "-m", "stoker.runtime.cli", "down", "--data", str(data)], capture_output=True, timeout=60
        )
        for caller in callers:
            caller.join()
    assert down.returncode == 0, down.stderr
    assert b"5 jobs running: up to 3 s to finish, then back to the queue" in down.stderr
    assert (answers["plain"].status_code, answers["plain"].json()["error"]["code"]) == (503, "gateway_stopping")
    assert answers["plain"].headers["x-should-retry"] == "false" and answers["plain"].headers["x-job-id"] in ids
    assert answers["keyed"].status_code == 503 and "x-should-retry" not in answers["keyed"].headers
    assert answers["patient"].status_code == 202 and answers["patient"].json()["id"] in ids
    assert answers["streamed"].status_code == 503 or "gateway_stopping" in answers["streamed"].text
    never.touch()
    with LocalStack(data) as stack, stack.client() as client:
        records = [client.wait(job_id, 60) for job_id in ids]
        assert {record["id"] for record in records} >= {detached.id}
        assert [(record["state"], record["result"], record["attempt"]) for record in records] == [
            ("succeeded", "done", 1)
        ] * 5


def running(client: Any) -> list[dict[str, Any]]:
    return client.request("GET", "/v1/jobs", params={"state": "running"})["data"]
