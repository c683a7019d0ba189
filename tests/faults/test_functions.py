"""What user code may do to its worker: none of it may hang a caller, hurt a neighbour or outlive the worker."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from stoker.runtime.client.client import Client
from stoker.runtime.client.errors import StokerError
from stoker.runtime.local import LocalStack

pytestmark = pytest.mark.xdist_group("functions")

APP = """
import os, sys, time
import stoker

app = stoker.App("odd")
{top}

@app.function(retries=0)
def odd(kind):
    if kind == "exit": sys.exit(3)
    if kind == "interrupt": raise KeyboardInterrupt
    if kind == "tuple key": return {{(1, 2): 3}}
    if kind == "deep":
        value = []
        for _ in range(500): value = [value]
        return value
    if kind == "fork and die":
        if os.fork() == 0:
            time.sleep(120)
            os._exit(0)
        os._exit(9)
    if kind == "fork":
        pid = os.fork()
        if pid == 0:
            time.sleep(120)
            os._exit(0)
        return pid
    return {value!r}
"""


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStack]:
    with LocalStack(tmp_path_factory.mktemp("odd") / "data", env={"STOKER_LEASE_MS": "2000"}) as stack:
        yield stack


@pytest.fixture
def client(stack: LocalStack, tmp_path: Path) -> Iterator[Client]:
    deploy(stack, tmp_path)
    with stack.client() as client:
        until_answer(client, "fine")
        yield client


def deploy(stack: LocalStack, folder: Path, value: str = "fine", top: str = "") -> None:
    path = folder / "odd_app.py"
    path.write_text(APP.format(value=value, top=top))
    stack.deploy(path)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("exit", "SystemExit"),
        ("interrupt", "KeyboardInterrupt"),
        ("tuple key", "tuple"),
        ("deep", "nested"),
        ("fork and die", "exit code 9"),
    ],
)
def test_a_call_that_goes_wrong_ends_at_once_and_the_next_one_works(client: Client, kind: str, message: str) -> None:
    started = time.monotonic()
    with pytest.raises(StokerError, match=message):
        client.invoke("odd", kind)
    assert time.monotonic() - started < 30
    assert client.invoke("odd", "normal") == "fine"


def test_what_a_function_forks_ends_with_its_worker(client: Client, stack: LocalStack) -> None:
    orphan = psutil.Process(client.invoke("odd", "fork"))
    with pytest.raises(StokerError):
        client.invoke("odd", "fork and die")
    assert not psutil.wait_procs([orphan], timeout=10)[1]


def test_a_version_that_can_not_start_does_not_take_the_working_one_down(
    client: Client, stack: LocalStack, tmp_path: Path
) -> None:
    assert client.invoke("odd", "normal") == "fine"
    deploy(stack, tmp_path, value="new", top="if os.path.dirname(__file__).endswith('/code'): 1 / 0")
    deadline = time.monotonic() + 6
    while time.monotonic() < deadline:
        assert client.invoke("odd", "normal") == "fine"
        time.sleep(0.1)
    deploy(stack, tmp_path, value="newest")
    until_answer(client, "newest")


def test_deleted_code_is_never_served_again(client: Client, stack: LocalStack, tmp_path: Path) -> None:
    assert client.invoke("odd", "normal") == "fine"
    for number in range(3):
        client.delete("odd")
        deploy(stack, tmp_path, value=f"life {number}")
        assert client.invoke("odd", "normal") == f"life {number}"


def test_a_bundle_that_is_damaged_fails_the_job(client: Client, stack: LocalStack, tmp_path: Path) -> None:
    client.delete("odd")
    deploy(stack, tmp_path, value="damaged")
    newest = max((stack.data_dir / "store" / "bundles").glob("*.zip"), key=os.path.getmtime)
    data = bytearray(newest.read_bytes())
    data[len(data) // 2] ^= 1
    newest.write_bytes(data)
    with pytest.raises(StokerError, match="sha256") as caught:
        client.invoke("odd", "normal")
    assert caught.value.status == 503


def test_a_loading_replica_that_is_no_longer_wanted_goes(client: Client, stack: LocalStack, tmp_path: Path) -> None:
    client.delete("odd")
    deploy(stack, tmp_path, value="slow", top="time.sleep(4)")
    client.spawn("odd", "normal")
    time.sleep(1)
    client.delete("odd")
    deploy(stack, tmp_path, value="quick")
    assert client.invoke("odd", "normal") == "quick"
    deadline = time.monotonic() + 60
    while (states := next(row["replicas"] for row in client.functions() if row["name"] == "odd")) != {"ready": 1}:
        assert time.monotonic() < deadline, states
        time.sleep(0.1)


def until_answer(client: Client, wanted: str) -> None:
    deadline = time.monotonic() + 60
    while client.invoke("odd", "normal") != wanted:
        assert time.monotonic() < deadline
        time.sleep(0.1)
