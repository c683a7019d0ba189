"""Logs from user code to `stoker logs`: through real processes, with calls that run at once and workers that die."""

import contextlib
import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from typer.testing import CliRunner

from stoker.runtime.cli import app
from stoker.runtime.client.client import Client
from stoker.runtime.client.errors import StokerError
from stoker.runtime.local import LocalStack
from tests.children import child

pytestmark = pytest.mark.xdist_group("logs")

APP = """
import asyncio, logging, os, subprocess, time
import stoker

app = stoker.App("talk")
print("imports")


@app.function(idle_timeout=60)
def talk(word):
    print("says", word)
    logging.warning("warns of %s", word)
    os.write(1, f"native {word}\\n".encode())
    subprocess.run(["echo", "a child's", word])
    if word == "dies":
        os._exit(7)
    return word


@app.function(idle_timeout=60, concurrency=4)
def several(word):
    for i in range(20):
        print(word, i)
        time.sleep(0.01)
    os.write(2, b"who?\\n")


@app.function(idle_timeout=60, concurrency=4)
async def interleaved(word):
    for i in range(20):
        print(word, i)
        await asyncio.sleep(0.01)


@app.function(idle_timeout=60, batch=stoker.Batch(max_size=8, max_wait_ms=300))
def together(words):
    print("together", len(words))
    return words


@app.function(idle_timeout=60)
def flood(lines):
    for _ in range(lines // 1000):
        os.write(1, b"blah\\n" * 1000)
    return lines
"""
SLOW = """
import time
import stoker

app = stoker.App("slow")
time.sleep(2)


@app.function(idle_timeout=60)
def slow(seconds):
    time.sleep(seconds)
    return seconds


@app.function(idle_timeout=60)
def steps(seconds):
    yield 0
    time.sleep(seconds)
    yield 1
"""
SAID = ["says {}", "native {}", "a child's {}", "WARNING:root:warns of {}"]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStack]:
    folder = tmp_path_factory.mktemp("logs")
    with LocalStack(folder / "data") as stack:
        (folder / "talk_app.py").write_text(APP)
        stack.deploy(folder / "talk_app.py")
        yield stack


@pytest.fixture
def client(stack: LocalStack) -> Iterator[Client]:
    with stack.client() as client:
        yield client


def log_of(stack: LocalStack, *arguments: str) -> list[dict[str, Any]]:
    result = CliRunner().invoke(app, ["logs", *arguments, "--json", "--url", stack.url], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in result.stdout.splitlines()]


def texts(rows: list[dict[str, Any]]) -> list[str]:
    return [row["text"] for row in rows]


def test_what_a_job_writes_is_its_own_and_a_replica_s_life_is_told(stack: LocalStack, client: Client) -> None:
    jobs = {word: client.spawn("talk", word) for word in ("a", "b")}
    for word, job in jobs.items():
        assert job.get(timeout=60) == word
    version = client.request("GET", "/v1/functions/talk")["version"]
    for word, job in jobs.items():
        mine = until(lambda id=job.id: log_of(stack, "talk", "--job", id), lambda rows: len(rows) == 4)
        assert sorted(texts(mine)) == sorted(said.format(word) for said in SAID)
        rows = client.request("GET", f"/v1/jobs/{job.id}/logs")["data"]
        assert rows == mine
    rows = log_of(stack, "talk")
    life = [row["text"] for row in rows if row["stream"] == "stoker"]
    assert life[0] == f"starts on host local-0: version {version}" and life[1].startswith("ready in ")
    (imports,) = [row for row in rows if row["text"] == "imports"]
    assert imports["job"] is None and imports["replica"] == rows[0]["replica"]
    assert log_of(stack, "talk", "--replica", rows[0]["replica"]) == rows
    assert log_of(stack, "talk", "--replica", "other") == []
    assert log_of(stack, "talk", "--since", "1h") == rows
    shown = CliRunner().invoke(app, ["logs", "talk", "--url", stack.url]).stdout.splitlines()
    assert len(shown) == len(rows) and shown[0].endswith(f"{rows[0]['replica']} {life[0]}")
    with pytest.raises(StokerError, match="no job 'NOSUCH'"):
        log_of(stack, "talk", "--job", "NOSUCH")


def test_the_last_words_of_a_process_that_dies(stack: LocalStack, client: Client) -> None:
    job = client.spawn("talk", "dies")
    with pytest.raises(StokerError, match="stoker logs talk"):
        job.get(timeout=60)
    attempts = client.job(job.id)["attempt"]
    rows = until(lambda: log_of(stack, "talk", "--job", job.id), lambda rows: len(rows) == 4 * attempts)
    assert "says dies" in texts(rows)
    assert "its process ended with exit code 7" in texts(log_of(stack, "talk"))


@pytest.mark.parametrize("function", ["several", "interleaved"])
def test_calls_that_run_at_once(stack: LocalStack, client: Client, function: str) -> None:
    jobs = {word: client.spawn(function, word) for word in "abcd"}
    for job in jobs.values():
        job.get(timeout=60)
    for word, job in jobs.items():
        rows = until(lambda id=job.id: log_of(stack, function, "--job", id), lambda rows: len(rows) >= 20)
        assert [text for text in texts(rows) if text != "who?"] == [f"{word} {i}" for i in range(20)]


def test_a_line_of_a_batch_is_its_job_s_only_if_that_is_alone(stack: LocalStack, client: Client) -> None:
    alone = client.spawn("together", 1)
    alone.get(timeout=60)
    assert texts(until(lambda: log_of(stack, "together", "--job", alone.id), bool)) == ["together 1"]
    batch = [client.spawn("together", i) for i in range(5)]
    client.gather(*batch)
    rows = until(lambda: log_of(stack, "together"), lambda rows: len(rows) >= 4 and "together 5" in texts(rows))
    assert [row["job"] for row in rows if row["text"] == "together 5"] == [None]


def test_a_flood_is_bounded_and_hurts_nobody(stack: LocalStack, client: Client) -> None:
    client.invoke("flood", 0)
    job = client.spawn("flood", 3_000_000)
    slowest = max(timed(lambda: client.invoke("talk", "calm")) for _ in range(10))
    assert job.get(timeout=120) == 3_000_000
    assert client.job(job.id)["attempt"] == 1 and slowest < 5
    path = "/v1/functions/flood/logs?limit=5000"

    def told(rows: list[dict]) -> int:
        left_out = sum(int(text.split()[2]) for text in texts(rows) if text.startswith("left out"))
        return texts(rows).count("blah") + left_out

    rows = until(lambda: client.request("GET", path)["data"], lambda rows: told(rows) == 3_000_000)
    assert 2_000 <= len(rows) < 5_000


def test_a_log_is_followed_until_ctrl_c(stack: LocalStack, client: Client) -> None:
    client.invoke("talk", "before")
    command = [sys.executable, "-m", "stoker.runtime.cli", "logs", "talk", "-f", "--url", stack.url]
    with child(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as follower:
        assert follower.stdout
        seen: list[str] = []
        while "says before" not in "".join(seen):
            seen.append(follower.stdout.readline())
        client.invoke("talk", "after")
        while "says after" not in "".join(seen):
            seen.append(follower.stdout.readline())
        kill_gateway(stack)
        until(lambda: said_again(client), bool)
        while "says again" not in "".join(seen):
            seen.append(follower.stdout.readline())
        assert "".join(seen).count("says after") == 1, "it goes on where it was"
        follower.send_signal(signal.SIGINT)
        assert follower.wait(10) == 130
        assert follower.stderr and follower.stderr.read() == ""


def test_a_job_s_log_is_followed_to_its_end(stack: LocalStack, client: Client) -> None:
    job = client.spawn("several", "x")
    rows = log_of(stack, "several", "-f", "--job", job.id)
    assert client.job(job.id)["state"] == "succeeded"
    assert [text for text in texts(rows) if text != "who?"] == [f"x {i}" for i in range(20)]


def kill_gateway(stack: LocalStack) -> None:
    (gateway,) = [p for p in psutil.Process(stack.pid).children() if "gateway" in p.cmdline()]
    gateway.kill()
    gateway.wait(10)


def said_again(client: Client) -> bool:
    with contextlib.suppress(StokerError):
        return client.invoke("talk", "again") == "again"
    return False


def test_a_person_sees_what_a_call_waits_for_and_ctrl_c_cancels_it(stack: LocalStack, tmp_path: Path) -> None:
    path = tmp_path / "slow_app.py"
    path.write_text(SLOW)
    stack.deploy(path)
    command = [sys.executable, "-m", "stoker.runtime.cli", "invoke", "--url", stack.url, "slow"]
    with on_terminal([*command, "2"]) as (invoke, terminal):
        shown = read_until(terminal, b"running")
        assert invoke.stdout and invoke.stdout.read() == b"2\n" and invoke.wait(10) == 0
    assert b"slow: " in shown and (b"start" in shown or b"load" in shown)
    with on_terminal([*command[:-1], "steps", "60"]) as (invoke, terminal):
        read_until(terminal, b"running")
        assert invoke.stdout and invoke.stdout.readline() == b"0\n"
        invoke.send_signal(signal.SIGINT)
        assert invoke.wait(10) == 130 and invoke.stdout.read() == b""
    with on_terminal([*command, "60"]) as (invoke, terminal):
        read_until(terminal, b"running")
        invoke.send_signal(signal.SIGINT)
        assert invoke.wait(10) == 130
    with stack.client() as client:
        for name in ("slow", "steps"):
            running = lambda name=name: client.request("GET", f"/v1/functions/{name}")["running"]  # noqa: E731
            until(running, lambda count: count == 0)


@contextlib.contextmanager
def on_terminal(command: list[str]) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """Its standard error is a terminal, the other end of which is given."""
    ours, theirs = pty.openpty()
    env = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    try:
        with child(command, stdout=subprocess.PIPE, stderr=theirs, env=env) as process:
            yield process, ours
    finally:
        os.close(theirs)
        os.close(ours)


def read_until(terminal: int, text: bytes, timeout_s: float = 90) -> bytes:
    shown, deadline = b"", time.monotonic() + timeout_s
    while text not in shown:
        assert time.monotonic() < deadline, shown
        if select.select([terminal], [], [], 0.2)[0]:
            shown += os.read(terminal, 4096)
    return shown


def timed(call: Callable[[], Any]) -> float:
    started = time.monotonic()
    call()
    return time.monotonic() - started


def until(look: Callable[[], Any], holds: Callable[[Any], Any], timeout_s: float = 90) -> Any:
    deadline = time.monotonic() + timeout_s
    while not holds(found := look()):
        assert time.monotonic() < deadline, found
        time.sleep(0.1)
    return found
