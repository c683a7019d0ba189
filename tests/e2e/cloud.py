"""A cloud for tests: moto holds the Auto Scaling groups, a proxy before it fails on demand, and a loop plays EC2 by
running a real host agent for each instance that moto lists."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import redis
from botocore.exceptions import BotoCoreError, ClientError
from botocore.parsers import ResponseParserError

from stoker.queue.cluster import FLEET_MEMORY, LEADER
from stoker.queue.embedded import EmbeddedValkey
from stoker.queue.records import pack, unpack
from stoker.runtime.client.client import Client
from stoker.runtime.deployment import deploy
from stoker.runtime.processes import parent_mark
from stoker.runtime.supervisor import check_port
from tests.children import end
from tests.e2e.aws_api import KEYS, Faults, Moto, Proxy, answers, until

CLI = [sys.executable, "-m", "stoker.runtime.cli"]
LOOP_S = 0.1
GROUP_TAG = "aws:autoscaling:groupName"
# The hosts of these tests run Python functions alone: their zygotes need not import the engine.
WITHOUT_ENGINE = """
import sys, types
for name in ("torch", "stoker.runtime.engine.models", "stoker.runtime.engine.process"):
    sys.modules[name] = types.ModuleType(name)
sys.modules["torch"].seed = lambda: None
"""
APP = """
import os
import time

import stoker

app = stoker.App("work")


@app.function(idle_timeout=0.5, retries=4)
def work(gate: str) -> str:
    '''Until a file appears: the test says when.'''
    while gate and not os.path.exists(gate):
        time.sleep(0.02)
    return gate
"""


class Ec2(threading.Thread):
    """Starts an agent for each running instance of a group, and ends it when the instance is terminated. An API that is
    away or is cut off in the middle of an answer is asked again; agents die with this thread, whatever ends it."""

    def __init__(self, moto: Moto, faults: Faults, environment: Mapping[str, str], metadata: str, folder: Path) -> None:
        super().__init__()
        self.agents: dict[str, subprocess.Popen[bytes] | None] = {}
        self.started: list[str] = []
        self._moto = moto
        self._faults = faults
        self._environment = environment
        self._metadata = metadata
        self._folder = folder
        self._ends: dict[str, float] = {}
        self._stopping = threading.Event()

    def run(self) -> None:
        try:
            while not self._stopping.wait(LOOP_S):
                with suppress(BotoCoreError, ClientError, ResponseParserError):
                    self._match(self._running())
        finally:
            for process in filter(None, self.agents.values()):
                end(process, 0)

    def stop(self) -> None:
        self._stopping.set()
        self.join()

    def crash(self, instance: str) -> None:
        """The machine is gone from one moment to the next; the group notices."""
        process = self.agents[instance]
        assert process
        process.kill()
        self._moto.client("ec2").terminate_instances(InstanceIds=[instance])

    def _running(self) -> dict[str, str]:
        states = [{"Name": "instance-state-name", "Values": ["running"]}]
        answer = self._moto.client("ec2").describe_instances(Filters=states)
        found = [instance for each in answer["Reservations"] for instance in each["Instances"]]
        tags = {instance["InstanceId"]: {t["Key"]: t["Value"] for t in instance.get("Tags", ())} for instance in found}
        return {id: named[GROUP_TAG].removeprefix("test-") for id, named in tags.items() if GROUP_TAG in named}

    def _match(self, running: Mapping[str, str]) -> None:
        for instance, pool in running.items():
            if instance not in self.agents:
                self.started.append(instance)
                self.agents[instance] = self._boot(instance, pool)
        for instance, process in self.agents.items():
            if instance not in running and process and process.poll() is None:
                self._shut_down(instance, process)

    def _boot(self, instance: str, pool: str) -> subprocess.Popen[bytes] | None:
        if self._faults.dead_boots:
            self._faults.dead_boots -= 1
            return None
        own = {"STOKER_POOL": pool, "STOKER_DATA": str(self._folder / instance)}
        own["PYTHONPATH"] = os.pathsep.join([str(self._folder), os.environ.get("PYTHONPATH", "")])
        own["AWS_EC2_METADATA_SERVICE_ENDPOINT"] = f"{self._metadata}/imds/{instance}"
        environment = {**self._environment, **own, **parent_mark(os.getpid())}
        with open(self._folder / f"{instance}.log", "ab") as log:
            return subprocess.Popen([*CLI, "worker", "--provider", "aws"], env=environment, stdout=log, stderr=log)

    def _shut_down(self, instance: str, process: subprocess.Popen[bytes]) -> None:
        """As an operating system does it: a signal, a moment, the plug."""
        if instance not in self._ends:
            self._ends[instance] = time.monotonic() + 5
            process.send_signal(signal.SIGTERM)
        elif time.monotonic() > self._ends[instance]:
            process.kill()


class Cloud:
    """Everything that a cluster on AWS has, on this machine. Use it as a context manager on the main thread."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.faults = Faults()
        self.moto = Moto()
        self.valkey = EmbeddedValkey(folder / "valkey")
        self.proxy = Proxy(self.moto, self.faults, self.kill_controller)
        self.url = ""
        self.kills = 0
        self._controller: subprocess.Popen[bytes] | None = None
        self._environment: dict[str, str] = {}
        self._cleanup = ExitStack()
        self._stopping = threading.Event()
        self._keeper = threading.Thread(target=self._keep_controller)

    def __enter__(self) -> "Cloud":
        """With two pools, one cheaper, and a function."""
        (self.folder / "sitecustomize.py").write_text(WITHOUT_ENGINE)
        with self._cleanup as cleanup:
            cleanup.callback(self.moto.stop)
            self.moto.start()
            self.valkey.start()
            cleanup.callback(self.valkey.stop)
            self.proxy.start()
            cleanup.callback(self.proxy.stop)
            self._environment = self.environment()
            self.ec2 = Ec2(self.moto, self.faults, self._environment, self.proxy.url, self.folder)
            self.ec2.start()
            cleanup.callback(self.ec2.stop)
            self._keeper.start()
            cleanup.callback(self._stop_keeper)
            self._start_gateway(cleanup)
            self.make_pools()
            self._deploy()
            self._cleanup = cleanup.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        self._cleanup.close()

    def environment(self) -> dict[str, str]:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "STOKER_"))}
        own = {
            "STOKER_REDIS": self.valkey.url,
            "STOKER_STORE": (self.folder / "store").as_uri(),
            "STOKER_LEASE_MS": "2000",
            "STOKER_CLUSTER": "test",
            "STOKER_HOST_IDLE_S": "0.5",
            "AWS_ENDPOINT_URL": self.proxy.url,
            "AWS_CONFIG_FILE": os.devnull,
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
            "PYTHONUNBUFFERED": "1",
        }
        return {**inherited, **KEYS, **own}

    def kill_controller(self) -> None:
        """SIGKILL; the next one starts at once."""
        with self._between_controllers():
            pass

    @contextmanager
    def _between_controllers(self) -> Iterator[redis.Redis]:
        """The next one leads from the end on: the lease of a process that is surely dead needs no waiting for."""
        controller = self._controller
        assert controller
        end(controller, 0)
        with redis.Redis.from_url(self.valkey.url) as client:
            yield client
            client.delete(LEADER)
        self.kills += 1

    def _keep_controller(self) -> None:
        """A child's life ends with the thread that started it, so this one waits for the last."""
        try:
            while not self._stopping.wait(LOOP_S):
                if self._controller is None or self._controller.poll() is not None:
                    self._controller = self._run("controller", "--provider", "aws")
        finally:
            if self._controller:
                end(self._controller)

    def _stop_keeper(self) -> None:
        self._stopping.set()
        self._keeper.join()

    def forgive(self, pool: str = "") -> None:
        """A pool that refused (or all) may be asked again now instead of in half a minute, by the next controller."""
        with self._between_controllers() as client:
            kept: Any = client.get(FLEET_MEMORY)
            memory = unpack(kept or pack({}))
            memory["pools"] = {name: row for name, row in memory.get("pools", {}).items() if pool and name != pool}
            client.set(FLEET_MEMORY, pack(memory))

    def client(self) -> Client:
        """Whatever is waited for would never come without the two threads; pytest shows why one ended."""
        assert self.ec2.is_alive(), "nobody starts hosts any more"
        assert self._keeper.is_alive(), "nobody starts controllers any more"
        return Client(self.url)

    def make_pools(self) -> None:
        self.moto.make_group("cheap", price=0.1)
        self.moto.make_group("dear", price=0.5)

    def _deploy(self) -> None:
        (self.folder / "app.py").write_text(APP)
        with self.client() as client:
            deploy(self.folder / "app.py", client)

    def hosts(self) -> dict[str, Any]:
        with self.client() as client:
            return client.hosts()

    def pool(self, name: str) -> dict[str, Any]:
        return next(row for row in self.hosts()["pools"] if row["pool"] == name)

    def size(self, *pools: str) -> int:
        """Instances and wanted instances: 0 only when there are none of either."""
        return sum(len(self.moto.instances(pool)) + self.moto.group(pool)["DesiredCapacity"] for pool in pools)

    def submit(self, value: object) -> str:
        with self.client() as client:
            return client.spawn("work", value).id

    def job(self, job_id: str) -> dict[str, Any]:
        with self.client() as client:
            return client.job(job_id)

    def until_done(self, job_id: str) -> dict[str, Any]:
        until(lambda: self.job(job_id)["state"] not in ("queued", "running", "retrying"), "the job to end")
        done = self.job(job_id)
        assert done["state"] == "succeeded", done
        return done

    def command(self, *arguments: str) -> str:
        command = [*CLI, *arguments, "--url", self.url]
        wide = {**os.environ, "COLUMNS": "200"}
        return subprocess.run(command, capture_output=True, text=True, check=True, env=wide).stdout

    def _start_gateway(self, cleanup: ExitStack) -> None:
        port = check_port("127.0.0.1", 0)
        process = self._run("gateway", "--host", "127.0.0.1", "--port", str(port))
        cleanup.callback(end, process)
        self.url = f"http://127.0.0.1:{port}"
        until(lambda: answers(self.url), "the gateway")

    def _run(self, name: str, *arguments: str) -> subprocess.Popen[bytes]:
        with open(self.folder / f"{name}.log", "ab") as log:
            environment = {**self._environment, **parent_mark(os.getpid())}
            return subprocess.Popen([*CLI, name, *arguments], env=environment, stdout=log, stderr=log)
