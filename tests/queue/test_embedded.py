import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from stoker.queue import embedded
from stoker.queue.embedded import SOCKET_PATH_LIMIT, EmbeddedServerError, EmbeddedValkey, default_socket_path
from tests.children import child


def eventually(condition: Callable[[], bool], seconds: float = 30) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.01)
    return condition()


def test_keeps_its_data_over_a_restart(tmp_path: Path) -> None:
    server = EmbeddedValkey(tmp_path)
    server.start()
    with redis.Redis.from_url(server.url) as client:
        client.set("kept", "1")
        assert client.config_get("maxmemory-policy", "appendonly", "appendfsync", "port") == {
            "maxmemory-policy": "noeviction",
            "appendonly": "yes",
            "appendfsync": "no",
            "port": "0",
        }
    server.stop()
    assert not server.alive() and not server.socket_path.exists()
    server.start()
    with redis.Redis.from_url(server.url) as client:
        assert client.get("kept") == b"1"
    server.stop()


def test_a_killed_server_starts_again_with_everything_acknowledged(tmp_path: Path) -> None:
    server = EmbeddedValkey(tmp_path)
    server.start()
    with redis.Redis.from_url(server.url) as client:
        for i in range(500):
            client.set(f"key{i}", i)
    assert server.pid is not None
    os.kill(server.pid, signal.SIGKILL)
    assert eventually(lambda: not server.alive())
    server.start()
    with redis.Redis.from_url(server.url) as client:
        assert client.dbsize() == 500
    server.stop()


def test_what_is_acknowledged_is_in_the_file_and_soon_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[tuple[int, int]] = []
    real = os.fsync

    def fsync(fd: int) -> None:
        state = os.fstat(fd)
        real(fd)
        synced.append((state.st_ino, state.st_size))

    monkeypatch.setattr(embedded, "SYNC_S", 0.05)
    monkeypatch.setattr(embedded.os, "fsync", fsync)
    server = EmbeddedValkey(tmp_path)
    server.start()
    (file,) = tmp_path.glob("appendonlydir/*.incr.aof")
    with redis.Redis.from_url(server.url) as client:
        for i in range(200):
            client.set("key", f"value-{i}")
            assert f"value-{i}\r\n".encode() in file.read_bytes()
    state = file.stat()
    assert eventually(lambda: (state.st_ino, state.st_size) in synced)
    server.stop()


def test_a_second_start_on_the_same_folder_names_the_holder(tmp_path: Path) -> None:
    server = EmbeddedValkey(tmp_path)
    server.start()
    with pytest.raises(EmbeddedServerError, match=f"in use by process {os.getpid()}"):
        EmbeddedValkey(tmp_path).start()
    server.start()
    assert server.alive()
    server.stop()
    server.stop()


def test_stale_files_are_no_obstacle(tmp_path: Path) -> None:
    (tmp_path / "valkey.lock").write_text("999999999")
    (tmp_path / "valkey.sock").touch()
    server = EmbeddedValkey(tmp_path)
    server.start()
    assert (tmp_path / "valkey.lock").read_text() == str(os.getpid())
    server.stop()


def test_survives_the_thread_that_started_it(tmp_path: Path) -> None:
    server = EmbeddedValkey(tmp_path)
    thread = threading.Thread(target=server.start)
    thread.start()
    thread.join()
    time.sleep(0.2)
    assert server.alive()
    server.stop()


def test_a_socket_path_that_is_too_long_moves_to_the_temporary_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", "/tmp")
    folder = tmp_path / ("deep" * 30)
    path = default_socket_path(folder)
    assert len(str(path)) <= SOCKET_PATH_LIMIT < len(str(folder / "valkey.sock"))
    assert path == default_socket_path(folder) != default_socket_path(tmp_path / ("else" * 30))
    server = EmbeddedValkey(folder)
    server.start()
    with redis.Redis.from_url(server.url) as client:
        assert client.ping()
    assert (folder / "appendonlydir").is_dir()
    assert path.parent.stat().st_mode & 0o777 == 0o700
    server.stop()
    path.parent.rmdir()


def test_an_explicit_socket_path_that_is_too_long_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(EmbeddedServerError, match="longer than 107 bytes"):
        EmbeddedValkey(tmp_path, tmp_path / ("x" * 120)).start()


def test_a_folder_someone_else_put_in_the_socket_place_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / ("deep" * 30)
    with tempfile.TemporaryDirectory() as short:
        monkeypatch.setattr("tempfile.tempdir", short)
        default_socket_path(folder).parent.symlink_to(tmp_path)
        with pytest.raises(EmbeddedServerError, match="belongs to someone else"):
            EmbeddedValkey(folder).start()


def test_says_why_it_did_not_start(tmp_path: Path) -> None:
    folder = tmp_path / "appendonlydir"
    folder.mkdir()
    (folder / "appendonly.aof.manifest").write_text("no manifest\n")
    server = EmbeddedValkey(tmp_path)
    with pytest.raises(EmbeddedServerError, match="(?s)ended while starting.*manifest"):
        server.start()
    assert not server.alive()
    (folder / "appendonly.aof.manifest").unlink()
    server.start()
    server.stop()


BUSY_SCRIPT = "local t = 0 while true do t = t + 1 end"
PARENT = """
    import sys, time
    from pathlib import Path
    from stoker.queue.embedded import EmbeddedValkey
    server = EmbeddedValkey(Path(sys.argv[1]))
    server.start()
    print(server.pid, flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("busy", [False, True])
def test_sigkill_of_the_parent_leaves_no_server(tmp_path: Path, busy: bool) -> None:
    with child([sys.executable, "-c", textwrap.dedent(PARENT), str(tmp_path)], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        socket = str(tmp_path / "valkey.sock")
        client = redis.Redis(unix_socket_path=socket, socket_timeout=0.2, retry=Retry(NoBackoff(), 0))
        client.set("kept", "1")
        if busy:
            with pytest.raises(redis.exceptions.TimeoutError):
                client.eval(BUSY_SCRIPT, 0)
        client.close()
    assert eventually(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    server = EmbeddedValkey(tmp_path)
    server.start()
    with redis.Redis.from_url(server.url) as client:
        assert client.get("kept") == b"1"
    server.stop()
