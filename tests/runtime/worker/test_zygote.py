"""A zygote that all tests of this file fork from; one of them kills it."""

import asyncio
import gc
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
import pytest_asyncio

from stoker.runtime.worker.zygote_link import KILLED, Forked, ZygoteGone, ZygoteLink, start_phases

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHILD = """
import json, os, sys, time

def main():
    from stoker.runtime.processes import die_with_parent

    die_with_parent()
    import torch
    with os.fdopen(int(sys.argv[1]), "w") as out:
        torch.set_num_threads(2)
        product = torch.ones(300, 300) @ torch.ones(300, 300)
        facts = {"pid": os.getpid(), "parent": os.getppid(), "sum": product.sum().item(), "argv": sys.argv[2:]}
        facts |= {"random": torch.rand(1).item(), "redis": os.environ.get("STOKER_REDIS"), "mark": os.environ["MARK"]}
        facts |= {"name": open("/proc/self/comm").read().strip()}
        facts |= {"fds": len(os.listdir("/proc/self/fd")), "cuda": torch.cuda.is_initialized(), "session": os.getsid(0)}
        json.dump(facts, out)
    if sys.argv[2] == "sleep":
        time.sleep(60)
    sys.exit(int(sys.argv[3]))
"""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def zygote(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ZygoteLink]:
    folder = tmp_path_factory.mktemp("zygote")
    (folder / "zygote_test_child.py").write_text(CHILD)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(folder))
        patch.setenv("STOKER_REDIS", "redis://secret")
        link = ZygoteLink(folder / "zygote.log")
        yield link
        await link.close()


async def fork(zygote: ZygoteLink, tmp_path: Path, *argv: str, **options: bool) -> tuple[Forked, dict]:
    """The child and what it wrote about itself through the descriptor it was given."""
    ours, theirs = os.pipe()
    child = await zygote.fork(
        "zygote_test_child",
        "{0}",
        *argv,
        name="test-child",
        env={"MARK": "m"},
        fds=(theirs,),
        log=tmp_path / "child.log",
        **options,
    )
    os.close(theirs)
    with os.fdopen(ours) as report:
        facts = json.loads(await asyncio.to_thread(report.read))
    return child, facts


async def test_children_compute_with_threads_and_say_how_they_ended(zygote: ZygoteLink, tmp_path: Path) -> None:
    child, facts = await fork(zygote, tmp_path, "go", "3")
    assert await child.wait() == 3 == child.returncode
    assert facts["pid"] == child.pid and facts["sum"] == 300.0**3
    assert facts["argv"] == ["go", "3"] and facts["mark"] == "m" and facts["name"] == "test-child"


async def test_children_know_no_secret_and_draw_their_own_numbers(zygote: ZygoteLink, tmp_path: Path) -> None:
    (first, one), (second, two) = await asyncio.gather(*(fork(zygote, tmp_path, "go", "0") for _ in range(2)))
    assert one["redis"] is None and one["random"] != two["random"] and not one["cuda"]
    assert await first.wait() == 0 == await second.wait()
    last, facts = await fork(zygote, tmp_path, "go", "0", new_session=True)
    assert facts["session"] == last.pid and facts["fds"] <= one["fds"]


async def test_killing_the_zygote_ends_its_children_and_the_next_request_starts_another(
    zygote: ZygoteLink, tmp_path: Path
) -> None:
    child, facts = await fork(zygote, tmp_path, "sleep", "0")
    os.kill(facts["parent"], signal.SIGKILL)
    assert await asyncio.wait_for(child.wait(), 45) == KILLED
    gone = psutil.Process(child.pid) if psutil.pid_exists(child.pid) else None
    assert gone is None or not psutil.wait_procs([gone], timeout=5)[1]
    again, _ = await fork(zygote, tmp_path, "go", "0")
    assert await again.wait() == 0


async def test_a_child_that_raises_leaves_its_traceback_and_the_zygote_alive(
    zygote: ZygoteLink, tmp_path: Path
) -> None:
    log = tmp_path / "child.log"
    child = await zygote.fork("no_such_module", name="x", env={}, fds=(), log=log)
    assert await child.wait() == 1
    assert "ModuleNotFoundError" in log.read_text()
    assert await (await fork(zygote, tmp_path, "go", "0"))[0].wait() == 0


async def test_a_request_to_a_zygote_that_can_not_start_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    link = ZygoteLink(tmp_path / "zygote.log")
    with pytest.raises(ZygoteGone):
        await link.fork("anything", name="x", env={}, fds=(), log=tmp_path / "child.log")
    await link.close()


async def test_a_request_that_nobody_waits_for_any_more_ends_in_silence(tmp_path: Path) -> None:
    loop, said = asyncio.get_running_loop(), []
    loop.set_exception_handler(lambda _, context: said.append(context["message"]))
    try:
        link = ZygoteLink(tmp_path / "zygote.log")
        forking = asyncio.create_task(link.fork("anything", name="x", env={}, fds=(), log=tmp_path / "child.log"))
        while not link._requests:
            await asyncio.sleep(0.01)
        forking.cancel()
        await asyncio.gather(forking, return_exceptions=True)
        await link.close()
        del link, forking
        gc.collect()
        await asyncio.sleep(0)
    finally:
        loop.set_exception_handler(None)
    assert said == []


async def test_what_a_start_waited_for_the_zygote_is_a_phase_of_its_own(zygote: ZygoteLink, tmp_path: Path) -> None:
    await fork(zygote, tmp_path, "quick", "0")
    ready = zygote.ready_ns
    assert 0 < ready < time.monotonic_ns()
    (start,) = start_phases("engine process start", ready + 5, ready)
    assert (start["name"], start["start_ns"]) == ("engine process start", ready + 5)
    wait, start = start_phases("engine process start", ready - 5, ready)
    assert wait == {"name": "wait for zygote", "start_ns": ready - 5, "end_ns": ready}
    assert (start["start_ns"], start["end_ns"] > ready) == (ready, True)
