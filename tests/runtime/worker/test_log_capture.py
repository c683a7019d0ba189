"""What processes really write into real pipes, and which job each line is told to be of."""

import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from redis.asyncio import Redis

from stoker.queue.client import connect
from stoker.queue.embedded import EmbeddedValkey
from stoker.runtime.logs.line import LINE_BYTES, Line
from stoker.runtime.logs.log_book import LogBook
from stoker.runtime.worker.log_capture import Capture
from stoker.runtime.worker.replica_log import BURST, MOST_LAST, ReplicaLog
from tests.children import child

CHILD = """
import asyncio, os, subprocess, sys, threading
from stoker.runtime.worker.job_output import redirect, speaking_for
redirect(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
"""


class Held:
    """A capture and what runs meanwhile."""

    def __init__(self, redis: Redis) -> None:
        self.book = LogBook(redis)
        self.running: set[str] = set()
        self.log = ReplicaLog(self.book, "f", "f-1")
        self.capture = Capture(self.log, lambda: self.running)

    async def run(self, program: str) -> list[Line]:
        """What is in the log once the program has ended."""
        out, err = self.capture.fds
        command = [sys.executable, "-c", CHILD + program, str(out), str(err), self.capture.mark]
        with child(command, pass_fds=(out, err)) as process:
            self.capture.started()
            await asyncio.to_thread(process.wait, 60)
            self.capture.close()
        await self.log.close()
        return (await self.book.last("f", 10_000, 0, lambda line: True))[0]


@pytest.fixture
async def redis(tmp_path: Path) -> AsyncIterator[Redis]:
    server = EmbeddedValkey(tmp_path / "valkey", tmp_path / "s")
    server.start()
    client = connect(server.url)
    yield client
    await client.aclose()
    server.stop()


@pytest.fixture
def held(redis: Redis) -> Held:
    return Held(redis)


def texts(lines: list[Line], stream: str = "stdout") -> list[str]:
    return [line.text for line in lines if line.stream == stream]


async def test_python_native_code_and_sub_processes_are_heard(held: Held) -> None:
    held.running = {"job"}
    lines = await held.run("""
print("printed")
os.write(1, b"native \\xff\\n")
subprocess.run(["echo", "from a child"])
print("an error", file=sys.stderr)
os.write(2, b"unfinished")
os._exit(1)
""")
    assert texts(lines) == ["printed", "native \N{REPLACEMENT CHARACTER}", "from a child"]
    assert texts(lines, "stderr") == ["an error", "unfinished"]
    assert {(line.replica, line.job) for line in lines} == {("f-1", "job")}


async def test_jobs_that_run_at_once_are_told_apart_where_python_writes(held: Held) -> None:
    held.running = {"a", "b"}
    lines = await held.run("""
def call(job):
    with speaking_for(job):
        for i in range(100):
            print(job, i)
        asyncio.run(awaited(job))
async def awaited(job):
    print(job, "in a task")
    print(job, "has no end", end="")
threads = [threading.Thread(target=call, args=(job,)) for job in "ab"]
for thread in threads: thread.start()
for thread in threads: thread.join()
os.write(1, b"of both\\n")
""")
    for job in "ab":
        mine = [line.text for line in lines if line.job == job]
        assert mine == [*(f"{job} {i}" for i in range(100)), f"{job} in a task", f"{job} has no end"]
    assert [line.text for line in lines if not line.job] == ["of both"]


async def test_a_mark_that_the_process_made_up_is_no_job_s(held: Held) -> None:
    held.running = {"a", "b"}
    lines = await held.run("""
os.write(1, b"\\x1e0123456789abcdef:a\\x1fforged\\n")
with speaking_for("c"):
    print("of a job that doesn't run here")
""")
    assert [(line.job, line.text.rpartition("\N{SYMBOL FOR UNIT SEPARATOR}")[2]) for line in lines] == [
        ("", "forged"),
        ("", "of a job that doesn't run here"),
    ]


async def test_a_line_without_an_end_waits_for_it_unless_the_process_dies(held: Held) -> None:
    held.running = {"a", "b"}
    lines = await held.run("""
with speaking_for("a"):
    print(".", end="", flush=True)
    print(".", end="", flush=True)
    print("!")
    print("last words", end="", flush=True)
    os._exit(3)
""")
    assert [(line.job, line.text) for line in lines] == [("a", "..!"), ("a", "last words")]


async def test_a_line_is_cut_and_shows_what_a_terminal_would_have_shown(held: Held) -> None:
    lines = await held.run(f"""
print("x" * {LINE_BYTES + 100})
print("10 %\\r50 %\\r100 %")
print("\\x1b[31mred\\x1b[0m \\x07")
os.write(1, b"y" * 3_000_000 + b"\\n")
""")
    assert texts(lines)[0] == "x" * LINE_BYTES + " … (100 bytes more)"
    assert texts(lines)[1:3] == ["100 %", "red \N{SYMBOL FOR BELL}"]
    assert texts(lines)[3].startswith("y" * LINE_BYTES) and len(texts(lines)[3]) < LINE_BYTES + 40


async def test_a_flood_is_counted_and_costs_its_writer_alone(held: Held) -> None:
    lines = await held.run("""
for i in range(300):
    os.write(1, b"native\\n" * 1000)
""")
    kept = texts(lines).count("native")
    said = [line.text for line in lines if line.stream == "stoker"]
    assert BURST <= kept <= BURST + 1000
    assert sum(int(text.split()[2]) for text in said) == 300_000 - kept
    assert all(text.startswith("left out") for text in said)


@pytest.mark.parametrize("at_once", [True, False])
async def test_a_burst_ends_with_its_last_lines(held: Held, at_once: bool) -> None:
    """And says how many are missing before them."""
    held.running = {"a", "b"}
    wait = "" if at_once else "time.sleep(0.001 * (i % 100 == 0))"
    lines = await held.run(f"""
import time
with speaking_for("a"):
    for i in range(3000):
        print(i)
        {wait}
    print("the warning")
""")
    shown = texts(lines)
    (note,) = [line.text for line in lines if line.stream == "stoker"]
    first = [line.text for line in lines].index(note)
    assert shown[first:] == [*(str(i) for i in range(2901, 3000)), "the warning"] and MOST_LAST == 100
    assert shown[:first] == [str(i) for i in range(first)] and first >= BURST
    assert note.startswith(f"left out {2901 - first} lines: ")
    assert {line.job for line in lines if line.stream == "stdout"} == {"a"}


async def test_no_line_is_left_out_that_the_end_has_room_for(held: Held) -> None:
    lines = await held.run(f"""
for i in range({int(BURST)} + 50):
    print(i)
""")
    assert [line.text for line in lines] == [str(i) for i in range(int(BURST) + 50)]


async def test_the_log_is_bounded_and_ends(redis: Redis) -> None:
    book = LogBook(redis)
    for _ in range(8):
        await book.append("f", [Line("r", "stdout", str(i)) for i in range(1000)])
    assert 5_000 <= await redis.xlen("stoker:log:{f}") < 5_500
    assert 0 < await redis.pttl("stoker:log:{f}") <= 86_400_000
    lines, place = await book.last("f", 3, 0, lambda line: True)
    assert [line.text for line in lines] == ["997", "998", "999"] and lines[-1].id == place
    await book.forget("f")
    assert await redis.keys("*") == []


async def test_lines_wait_for_a_server_that_is_away_and_then_say_what_is_missing(tmp_path: Path) -> None:
    server = EmbeddedValkey(tmp_path / "valkey", tmp_path / "s")
    server.start()
    client = connect(server.url, socket_timeout_s=0.5)
    log = ReplicaLog(LogBook(client), "f", "r")
    server.stop()
    for i in range(2500):
        log.write("stdout", str(i), "")
    await asyncio.sleep(0.2)
    server.start()
    await asyncio.sleep(1.5)
    await log.close()
    lines, _ = await LogBook(client).last("f", 10_000, 0, lambda line: True)
    shown = [int(line.text) for line in lines if line.stream == "stdout"]
    first = len(shown) - MOST_LAST
    assert shown == [*range(first), *range(2500 - MOST_LAST, 2500)] and first >= 2000
    missing = [line.text for line in lines if line.stream == "stoker"]
    assert missing and missing[0].startswith(f"left out {2500 - len(shown)} lines")
    await client.aclose()
    server.stop()
