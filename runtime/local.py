"""A whole stoker on this machine as a context manager: for demos, tests and benchmarks of one's own functions."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from stoker.runtime.client.client import Client
from stoker.runtime.deployment import deploy
from stoker.runtime.processes import parent_mark
from stoker.runtime.secret import kept_secret
from stoker.runtime.supervisor import read_state
from stoker.runtime.tenancy.api_key import Keyring

START_S = 60.0


class StartFailed(RuntimeError):
    """`stoker up` ended before it was ready."""


class LocalStack:
    """Runs `stoker up` on a free port in `data_dir`; leaving the block stops it, work handed back first. It never
    outlives this process (make it on the main thread: Linux follows the thread that starts a child). Where callers need
    a key (STOKER_AUTH=keys), `api_key` is the operator's, which `client` and `deploy` use."""

    def __init__(self, data_dir: Path, *, port: int = 0, env: dict[str, str] | None = None, hosts: int = 1) -> None:
        self.data_dir = data_dir
        self._command = [sys.executable, "-m", "stoker.runtime.cli", "up", "--data", str(data_dir)]
        self._command += ["--port", str(port), "--hosts", str(hosts)]
        self._env = {**os.environ, **(env or {}), **parent_mark(os.getpid())}
        self._process: subprocess.Popen[bytes] | None = None
        self.url = ""
        self.api_key = ""
        self.redis_url = ""
        self.store_url = ""

    def __enter__(self) -> "LocalStack":
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Returns when the gateway answers. Raises StartFailed with what `stoker up` said."""
        self.data_dir.mkdir(parents=True, exist_ok=True)
        with open(self.data_dir / "up.log", "ab") as log:
            self._process = subprocess.Popen(self._command, env=self._env, stdout=log, stderr=log)
        deadline = time.monotonic() + START_S
        while self._process.poll() is None and time.monotonic() < deadline:
            state = read_state(self.data_dir)
            if state and state["pid"] == self._process.pid:
                self.url, self.redis_url, self.store_url = (str(state[name]) for name in ("url", "redis", "store"))
                self.api_key = self._operators_key()
                return
            time.sleep(0.02)
        self.kill()
        raise StartFailed(f"`stoker up` did not start:\n{(self.data_dir / 'up.log').read_text()[-2000:]}")

    def stop(self) -> None:
        if self._process and self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(timeout=60)
            except subprocess.TimeoutExpired:
                self.kill()

    def kill(self) -> None:
        """SIGKILL: what a crash of the machine's supervisor looks like."""
        if self._process:
            self._process.kill()
            self._process.wait()

    def wait(self) -> None:
        assert self._process is not None
        self._process.wait()

    def client(self) -> Client:
        return Client(self.url, self.api_key)

    def deploy(self, file: Path) -> list[dict[str, Any]]:
        with self.client() as client:
            return [record for app in deploy(file, client) for record in app["functions"]]

    def _operators_key(self) -> str:
        """ "" where callers need none."""
        if self._env.get("STOKER_AUTH") != "keys":
            return ""
        return Keyring(self._env.get("STOKER_SECRET") or kept_secret(self.data_dir)).root_text()
