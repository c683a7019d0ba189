"""Places for replicas on this machine, and the users that they run as."""

import asyncio
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from stoker.runtime.spec import FunctionSpec
from stoker.runtime.wire import AsyncChannel, socket_pair
from stoker.runtime.worker import workplace
from stoker.runtime.worker.function_replica import MODULE, start_frame
from stoker.runtime.worker.log_capture import Capture
from stoker.runtime.worker.workplace import NoPlace, Workplace, can_switch_users, closed_folder, maps_uids, take_place
from stoker.runtime.worker.zygote_link import ZygoteLink

CODE = """
import json, os, subprocess, sys
import tempfile

def look(path):
    facts = {"uid": os.getuid(), "groups": os.getgroups(), "parent": os.getppid()}
    try:
        facts["read"] = open(path).read()
    except OSError as error:
        facts["read"] = type(error).__name__
    try:
        os.setuid(0)
        facts["root"] = True
    except PermissionError:
        facts["root"] = False
    open("own.txt", "w").write("x")
    child = os.fork()
    if child == 0:
        os.setsid()
        os.execv("/bin/sleep", ["sleep", "300"])
    return {**facts, "child": child}
"""


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    folder = tmp_path / "bundle"
    folder.mkdir()
    (folder / "looking.py").write_text(CODE)
    return folder


@pytest.fixture
def root_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(workplace.tempfile, "tempdir", str(tmp_path))
    yield tmp_path / f"stoker-functions-{os.geteuid()}"


def test_each_replica_has_a_place_until_it_leaves(bundle: Path, root_folder: Path) -> None:
    one, two = take_place(bundle), take_place(bundle)
    assert (one.folder, two.folder) == (root_folder / "0", root_folder / "1")
    assert (one.code / "looking.py").read_text() == CODE
    (one.code / "looking.py").write_text("changed")
    assert (two.code / "looking.py").read_text() == CODE == (bundle / "looking.py").read_text()
    one.leave()
    assert not (root_folder / "0").exists() and (root_folder / "1").exists()
    again = take_place(bundle)
    assert again.folder == root_folder / "0"
    again.leave()
    two.leave()


def test_what_was_left_in_a_place_is_gone(bundle: Path, root_folder: Path) -> None:
    """Its agent was killed: nobody holds the place's lock."""
    (root_folder / "0" / "tmp").mkdir(parents=True)
    (root_folder / "0" / "tmp" / "secret").write_text("of the replica before")
    place = take_place(bundle)
    assert place.folder == root_folder / "0" and list((place.folder / "tmp").iterdir()) == []
    place.leave()


def test_a_folder_of_somebody_elses_is_not_used(bundle: Path, root_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    root_folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(NoPlace, match="remove it, or set TMPDIR"):
        take_place(bundle)


def test_nothing_of_the_workers_environment_is_inherited_but_what_programs_need(
    bundle: Path, root_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("STOKER_SECRET", "AWS_SECRET_ACCESS_KEY", "DATABASE_URL", "REDIS_URL"):
        monkeypatch.setenv(name, "secret")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    place = take_place(bundle)
    env = place.environment()
    place.leave()
    assert "secret" not in env.values()
    assert env["CUDA_VISIBLE_DEVICES"] == "1" and env["PATH"] == os.environ["PATH"]
    assert env["TMPDIR"] == str(place.folder / "tmp")


def test_users_that_are_not_mapped_are_not_used() -> None:
    assert maps_uids("         0          0 4294967295")
    assert not maps_uids("         0     100000      65536")


def test_a_folder_that_others_may_not_pass_is_seen(tmp_path: Path) -> None:
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    (tmp_path / "a").chmod(0o700)
    closed = closed_folder(inner)
    assert closed in inner.parents and not closed.stat().st_mode & 0o001
    assert closed_folder(Path("/usr")) is None


@pytest.mark.skipif(os.geteuid() != 0, reason="only root could give users of their own")
def test_why_root_gives_no_users_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workplace, "closed_folder", lambda path: Path("/root"))
    told = workplace.why_users_are_shared()
    assert told and ("/root" in told or "CAP_" in told or "namespace" in told)
    assert not can_switch_users()


async def run_looking(place: Workplace, zygote: ZygoteLink, path: Path, log: Any) -> dict[str, Any]:
    """One call in a real function process, as a replica starts it."""
    ours, fd = socket_pair()
    output = Capture(log, frozenset)
    process = await zygote.fork(
        MODULE,
        *("--socket-fd", "{0}", "--mark", output.mark, "--output-fds", "{1}", "{2}"),
        name="stoker-function",
        env={},
        fds=(fd, *output.fds),
        log=path.parent / "starts.log",
        new_session=True,
    )
    os.close(fd)
    output.started()
    channel = await AsyncChannel.open(ours)
    channel.send(start_frame(FunctionSpec(name="look", kind="python", entry="looking:look"), place, {}))
    told: list[str] = []
    while "ready" not in told:
        told += [frame["t"] for frame in await channel.frames()]
    assert told == ["step", "ready"]
    channel.send({"t": "call", "batched": False, "items": [["a", str(path)]]})
    (answer,) = await channel.frames()
    channel.send({"t": "stop"})
    await process.wait()
    await channel.close()
    output.close()
    ((_, succeeded, value),) = answer["items"]
    assert succeeded, value
    return value


class NoLog:
    def room(self) -> int:
        return 0

    def drop(self, lines: int) -> None: ...

    def write(self, *line: str) -> None: ...


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start processes as other users")
async def test_as_root_a_function_runs_as_a_user_of_its_own(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It can't read the worker's files or become root; what it leaves running ends with it."""
    monkeypatch.setattr(workplace, "closed_folder", lambda path: None)
    monkeypatch.setattr(tempfile, "tempdir", os.environ["PYTEST_DEBUG_TEMPROOT"])
    if not can_switch_users():
        pytest.skip("this container may not start processes as other users")
    secret = tmp_path / "secret"
    secret.write_text("the worker's")
    secret.chmod(0o600)
    zygote = ZygoteLink(tmp_path / "zygote.log")
    place = await asyncio.to_thread(take_place, bundle)
    try:
        facts = await run_looking(place, zygote, secret, NoLog())
    finally:
        await asyncio.to_thread(place.leave)
        await zygote.close()
    assert facts["uid"] == place.uid >= workplace.FIRST_UID and facts["groups"] == []
    assert (facts["read"], facts["root"]) == ("PermissionError", False), json.dumps(facts)
    assert not psutil.pid_exists(facts["child"]) or psutil.Process(facts["child"]).status() == psutil.STATUS_ZOMBIE
    assert not place.folder.exists()
