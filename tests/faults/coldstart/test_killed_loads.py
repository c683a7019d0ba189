"""kill -9 at every phase of a load; the next one fetches only what is missing. Full disks only cost the cache."""

import hashlib
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from stoker.coldstart.chunk_cache import PARTIAL
from tests.coldstart.fetching import expected

Start = Callable[..., "subprocess.Popen[str]"]
URL = "s3://models"


@pytest.fixture
def start(tmp_path: Path, fault_server: Any, published: Any) -> Iterator[Start]:
    """Starts a loading process; those that still run are killed at the end."""
    published.serve(fault_server)
    processes: list[subprocess.Popen[str]] = []

    def start_child(*options: str, cache: Path = tmp_path / "cache", prefix: tuple[str, ...] = ()) -> Any:
        command = [*prefix, sys.executable, "-m", "tests.faults.coldstart.load_child", URL, str(cache), *options]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        processes.append(process)
        return process

    yield start_child
    fault_server.resume.set()
    for process in processes:
        process.kill()
        process.communicate()


def finish(process: "subprocess.Popen[str]") -> tuple[dict[str, Any], str]:
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    return json.loads(out.splitlines()[-1]), err


def right(report: dict[str, Any], published: Any) -> bool:
    return report["digests"] == [hashlib.sha256(data).hexdigest() for _, data in sorted(expected(published).items())]


def whole_files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*-*") if path.is_file() and not path.name.endswith(PARTIAL)]


def kill_when(start: Start, fault_server: Any, phase: str) -> None:
    """Runs a load into the phase and kills it there."""
    if phase == "half of a cache file written":
        process = start("--half-write", "9")
    elif phase == "cache file not renamed":
        process = start("--no-rename", "9")
    elif phase == "all handed out":
        process = start("--linger")
    else:
        count, fault = {"waiting for the first byte": (1, "silence"), "in mid body": (13, "stall")}[phase]
        reached = threading.Event()
        fault_server.faults.extend(["right"] * (count - 1))
        fault_server.always = fault
        fault_server.on_range = lambda seen: reached.set() if seen >= count else None
        process = start()
        assert reached.wait(30)
        process.kill()
        process.wait()
        fault_server.always, fault_server.on_range = "", lambda seen: None
        fault_server.faults.clear()
        return
    assert process.stdout and process.stdout.readline()
    process.kill()
    process.wait()


PHASES = [
    ("waiting for the first byte", 0),
    ("in mid body", 8),
    ("half of a cache file written", 8),
    ("cache file not renamed", 8),
    ("all handed out", 20),
]


@pytest.mark.parametrize(("phase", "at_least"), PHASES, ids=[phase.replace(" ", "-") for phase, _ in PHASES])
def test_a_killed_load_is_resumed(
    start: Start, fault_server: Any, published: Any, tmp_path: Path, phase: str, at_least: int
) -> None:
    chunks = len(published.manifest.chunks)
    kill_when(start, fault_server, phase)
    kept = len(whole_files(tmp_path / "cache"))
    assert at_least <= kept <= chunks
    report, _ = finish(start())
    assert right(report, published)
    chunks_from = {name: source["chunks"] for name, source in report["sources"].items()}
    assert (chunks_from.get("cache", 0), chunks_from.get("store", 0)) == (kept, chunks - kept)
    assert len(whole_files(tmp_path / "cache")) == chunks


def test_a_load_goes_on_when_the_process_that_shares_it_is_killed(
    start: Start, fault_server: Any, published: Any, tmp_path: Path
) -> None:
    """One process stands still with claimed chunks; its death frees them for the other."""
    standing = start("--half-write", "3")
    assert standing.stdout and standing.stdout.readline() == "half written\n"
    waiting = start()
    seen = threading.Event()
    fault_server.on_range = lambda count: seen.set() if count >= len(published.manifest.chunks) - 8 else None
    assert seen.wait(30) and waiting.poll() is None
    standing.kill()
    report, _ = finish(waiting)
    assert right(report, published)
    assert len(whole_files(tmp_path / "cache")) == len(published.manifest.chunks)


def test_a_disk_that_takes_no_more_costs_only_the_cache(
    start: Start, fault_server: Any, published: Any, tmp_path: Path
) -> None:
    report, err = finish(start("--max-file-bytes", "2000"))
    assert right(report, published)
    assert err.count("loading without it") == 1 and "File too large" in err
    assert not [path for path in whole_files(tmp_path / "cache") if path.stat().st_size > 2000]
    report, _ = finish(start())
    assert right(report, published)


def test_a_full_disk_costs_only_the_cache(start: Start, published: Any, tmp_path: Path) -> None:
    """A file system of 40 KiB, in a mount namespace of the process's own."""
    mount = f'mkdir -p {tmp_path}/small && mount -t tmpfs -o size=40k none {tmp_path}/small && exec "$@"'
    unshare = ("unshare", "--user", "--map-root-user", "--mount", "sh", "-c", mount, "sh")
    if subprocess.run(["unshare", "--user", "--map-root-user", "--mount", "true"], capture_output=True).returncode:
        pytest.skip("this machine lets nobody mount a file system")
    report, err = finish(start(cache=tmp_path / "small" / "cache", prefix=unshare))
    assert right(report, published)
    assert err.count("loading without it") == 1 and "No space left" in err
