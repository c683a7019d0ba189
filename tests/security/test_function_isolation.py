"""What user code can reach on its worker: its own folder and variables, nothing of the worker's or a neighbour's."""

import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from stoker.runtime.client.client import Client
from stoker.runtime.client.errors import StokerError
from stoker.runtime.local import LocalStack

pytestmark = pytest.mark.xdist_group("isolation")

APP = """
import os, subprocess, sys, tempfile, time
import stoker

app = stoker.App("isolated")

@app.function(env={"GREETING": "hello"}, retries=0)
def look(_):
    temporary = tempfile.mkdtemp()
    open("scribble.txt", "w").write("x")
    facts = {"pid": os.getpid(), "session": os.getsid(0), "uid": os.getuid(), "env": dict(os.environ)}
    return {**facts, "temporary": temporary, "folder": os.getcwd(), "home": os.path.expanduser("~")}

@app.function(retries=0)
def other(_):
    return {"pid": os.getpid(), "folder": os.getcwd(), "files": os.listdir(".")}

@app.function(retries=0)
def spawn(_):
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"]).pid

@app.function(memory_mb=150, retries=0)
def eat(mb: int) -> int:
    held = bytearray(mb << 20)
    held[::4096] = b"x" * len(held[::4096])
    return len(held)

@app.function(memory_mb=100, gpu="", retries=0)
def feed(mb: int) -> int:
    code = f"import time; b = bytearray({mb} << 20); b[::4096] = b'x' * len(b[::4096]); time.sleep(60)"
    return subprocess.Popen([sys.executable, "-c", code]).wait()
"""


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStack]:
    folder = tmp_path_factory.mktemp("isolated")
    env = {"AWS_ACCESS_KEY_ID": "the worker's", "HF_TOKEN": "the worker's"}
    with LocalStack(folder / "data", env=env) as stack:
        (folder / "isolated.py").write_text(APP)
        stack.deploy(folder / "isolated.py")
        yield stack


@pytest.fixture
def client(stack: LocalStack) -> Iterator[Client]:
    with stack.client() as client:
        yield client


def test_the_environment_is_the_functions_own(client: Client) -> None:
    env = client.invoke("look")["env"]
    assert env["GREETING"] == "hello"
    held = "\n".join(f"{name}={value}" for name, value in env.items())
    for word in ("the worker's", "STOKER_REDIS", "STOKER_SECRET", "STOKER_DATA", "valkey"):
        assert word not in held


def test_a_process_a_folder_and_a_session_of_its_own(client: Client) -> None:
    one, two = client.invoke("look"), client.invoke("other")
    assert one["pid"] != two["pid"] and one["session"] == one["pid"]
    assert one["folder"] != two["folder"] and {*two["files"]} - {"__pycache__"} == {"isolated.py"}
    assert Path(one["temporary"]).parent.parent == Path(one["home"]).parent == Path(one["folder"]).parent


def test_the_job_says_how_isolated_it_ran(client: Client) -> None:
    record = client.wait(client.spawn("look").id)
    assert (record["state"], record["isolation"]) == ("succeeded", "own-process")


def test_too_much_memory_is_the_calls_own_error(client: Client) -> None:
    assert client.invoke("eat", 20) == 20 << 20
    with pytest.raises(StokerError, match=r"^MemoryError \(it needed more than its memory_mb=150\)$"):
        client.invoke("eat", 4000)
    assert client.invoke("eat", 20) == 20 << 20


def test_memory_of_sub_processes_counts_too(client: Client) -> None:
    with pytest.raises(StokerError, match="more than its memory_mb=100") as caught:
        client.invoke("feed", 300)
    assert caught.value.code == "memory_exceeded"


def test_nothing_is_left_when_the_function_goes(client: Client) -> None:
    child, facts = psutil.Process(client.invoke("spawn")), client.invoke("look")
    for name in ("spawn", "look"):
        client.delete(name)
    deadline = time.monotonic() + 20
    folders = [Path(facts["folder"]), Path(facts["temporary"])]
    while child.is_running() and child.status() != psutil.STATUS_ZOMBIE or any(map(Path.exists, folders)):
        assert time.monotonic() < deadline, "its child or a folder of it is still there"
        time.sleep(0.05)


def test_a_killed_agents_places_are_cleared_when_they_are_used_again(tmp_path: Path) -> None:
    with LocalStack(tmp_path / "data", env={"STOKER_LEASE_MS": "2000"}) as stack, stack.client() as client:
        (tmp_path / "isolated.py").write_text(APP)
        stack.deploy(tmp_path / "isolated.py")
        first = client.invoke("look")
        function = psutil.Process(first["pid"])
        agent = next(each for each in psutil.Process(stack.pid).children() if "worker" in each.cmdline())
        agent.kill()
        function.wait(10)
        second = client.invoke("look")
        assert second["pid"] != first["pid"]
        assert not Path(first["temporary"]).exists() or second["folder"] != first["folder"]
