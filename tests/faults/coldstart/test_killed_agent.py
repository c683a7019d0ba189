"""kill -9 of a host agent in the middle of a load, in a whole stack: the request is answered, and the next agent
fetches only what its predecessor had not finished."""

import os
import signal
import threading
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from benchmarks.models import random_model
from stoker.coldstart.chunk_cache import PARTIAL
from stoker.coldstart.file_store import FileStore
from stoker.coldstart.publish import publish
from stoker.runtime.local import LocalStack
from tests.coldstart.fault_server import FaultServer
from tests.e2e.apps import CHAT

GOOD_RANGES = 20


def agent_of(stack: LocalStack) -> psutil.Process:
    children = psutil.Process(stack.pid).children(recursive=True)
    return next(child for child in children if "worker" in child.cmdline() and "--host-id" in child.cmdline())


def ask(stack: LocalStack, answers: list[httpx.Response]) -> None:
    body = {"model": "chat", "prompt": "w1 w2 w3", "max_tokens": 4, "temperature": 0}
    answers.append(httpx.post(f"{stack.url}/v1/completions", json=body, timeout=120))


@pytest.mark.xdist_group("damaged")
def test_a_killed_agent_s_load_is_resumed(fault_server: FaultServer, tmp_path: Path) -> None:
    folder = tmp_path / "store"
    manifest = publish(random_model("tiny", tmp_path / "tiny"), FileStore(folder), chunk_bytes=4096)
    fault_server.hold(folder, manifest)
    fault_server.faults.extend(["right"] * GOOD_RANGES)
    fault_server.always = "silence"
    stuck = threading.Event()
    fault_server.on_range = lambda count: stuck.set() if count > GOOD_RANGES + 4 else None
    answers: list[httpx.Response] = []
    with LocalStack(tmp_path / "data", env={"STOKER_LEASE_MS": "1500"}) as stack:
        app = tmp_path / "chat_app.py"
        app.write_text(CHAT.format(weights="s3://models", idle=30))
        stack.deploy(app)
        asking = threading.Thread(target=ask, args=(stack, answers))
        asking.start()
        assert stuck.wait(60)
        os.kill(agent_of(stack).pid, signal.SIGKILL)
        kept = [path for path in (tmp_path / "data" / "chunks").glob("*/*") if path.suffix != PARTIAL]
        fault_server.always = ""
        asking.join()
        job = httpx.get(f"{stack.url}/v1/jobs/{answers[0].headers['x-job-id']}").json()
    assert answers[0].status_code == 200, answers[0].text
    sources: dict[str, Any] = next(p["facts"] for p in job["timeline"] if p["name"] == "fetch weights")["sources"]
    assert sources["cache"]["chunks"] == len(kept) >= GOOD_RANGES - 4
    assert sources["store"]["chunks"] == len(manifest.chunks) - len(kept)
