"""A cloud for tests: moto holds the Auto Scaling groups, a proxy before it fails on demand, and a loop plays EC2 by
running a real host agent for each instance that moto lists."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs
from uuid import uuid4

import boto3
import httpx
import redis
from botocore.exceptions import BotoCoreError, ClientError

from stoker.queue.cluster import FLEET_MEMORY, LEADER
from stoker.queue.embedded import EmbeddedValkey
from stoker.queue.records import pack, unpack
from stoker.runtime.deployment import deploy
from stoker.runtime.processes import parent_mark
from stoker.runtime.sdk import Client
from stoker.runtime.supervisor import check_port
from tests.conftest import S3_SERVER

CLI = [sys.executable, "-m", "stoker.runtime.cli"]
KEYS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1"}
ZONES = ["us-east-1a", "us-east-1b"]
CHANGES = {"SetDesiredCapacity", "SetInstanceProtection", "TerminateInstanceInAutoScalingGroup"}
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
EMPTY = '<{0}Response xmlns="http://autoscaling.amazonaws.com/doc/2011-01-01/"><{0}Result>{1}</{0}Result></{0}Response>'
DENIED = b"<ErrorResponse><Error><Code>AccessDenied</Code><Message>not allowed</Message></Error></ErrorResponse>"
SCARCE = "We currently do not have sufficient {kind} capacity in the Availability Zone you requested ({zone})."
ACTIVITY = f"""<member><ActivityId>{{id}}</ActivityId><AutoScalingGroupName>{{group}}</AutoScalingGroupName>
<Description>Launching a new EC2 instance.</Description><Cause>a test</Cause><StartTime>{{at}}</StartTime>
<StatusCode>Failed</StatusCode><StatusMessage>{SCARCE}</StatusMessage><Progress>100</Progress></member>"""


def until(condition: Callable[[], Any], what: str, timeout_s: float = 90) -> Any:
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < deadline, f"gave up waiting for {what}"
        time.sleep(0.05)
    return found


def answers(url: str) -> bool:
    with suppress(httpx.TransportError):
        return httpx.get(f"{url}/readyz", trust_env=False).status_code == 200
    return False


class Moto:
    """A moto server in a process of its own: it starts empty each time."""

    def __init__(self) -> None:
        self.url = ""
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        self._process = subprocess.Popen([sys.executable, "-c", S3_SERVER], text=True, **pipes)  # type: ignore[call-overload]
        assert self._process and self._process.stdout
        self.url = f"http://127.0.0.1:{int(self._process.stdout.readline())}"

    def stop(self) -> None:
        if self._process and self._process.stdin and self._process.stdout:
            self._process.stdin.close()
            self._process.wait(10)
            self._process.stdout.close()

    def client(self, service: str) -> Any:
        facts = {"aws_access_key_id": "test", "aws_secret_access_key": "test", "region_name": "us-east-1"}
        return boto3.client(service, endpoint_url=self.url, **facts)

    def make_group(self, pool: str, *, price: float, cluster: str = "test") -> None:
        template = f"template-{pool}"
        data = {"ImageId": "ami-12c6146b", "InstanceType": "t3.micro"}
        self.client("ec2").create_launch_template(LaunchTemplateName=template, LaunchTemplateData=data)
        tags = {
            "cluster": cluster,
            "pool": pool,
            "gpu": "cpu",
            "price-per-hour": price,
        }
        self.client("autoscaling").create_auto_scaling_group(
            AutoScalingGroupName=f"test-{pool}",
            MinSize=0,
            MaxSize=1,
            DesiredCapacity=0,
            AvailabilityZones=ZONES,
            LaunchTemplate={"LaunchTemplateName": template},
            NewInstancesProtectedFromScaleIn=True,
            Tags=[
                {
                    "Key": f"stoker:{key}",
                    "Value": str(value),
                    "PropagateAtLaunch": False,
                    "ResourceId": f"test-{pool}",
                    "ResourceType": "auto-scaling-group",
                }
                for key, value in tags.items()
            ],
        )

    def set_boot_timeout(self, pool: str, timeout_s: float) -> None:
        tag = {"Key": "stoker:boot-timeout-s", "Value": str(timeout_s), "PropagateAtLaunch": False}
        whose = {"ResourceId": f"test-{pool}", "ResourceType": "auto-scaling-group"}
        self.client("autoscaling").create_or_update_tags(Tags=[{**tag, **whose}])

    def group(self, pool: str) -> dict[str, Any]:
        answer = self.client("autoscaling").describe_auto_scaling_groups(AutoScalingGroupNames=[f"test-{pool}"])
        return answer["AutoScalingGroups"][0]

    def instances(self, pool: str) -> list[str]:
        return [instance["InstanceId"] for instance in self.group(pool)["Instances"]]


@dataclass
class Faults:
    """What goes wrong. `traps` maps an operation to when the controllers that ask for it next are killed, one after the
    other: "before" it is carried out, or "after". `denied`: operations that nobody may call.
    `short`: pools that have no capacity, and how many hosts they were asked for. `notices`: by instance, for IMDS."""

    traps: dict[str, list[str]] = field(default_factory=dict)
    short: dict[str, int] = field(default_factory=dict)
    notices: dict[str, dict[str, Any]] = field(default_factory=dict)
    waits: set[str] = field(default_factory=set)
    denied: set[str] = field(default_factory=set)
    dead_boots: int = 0


class Proxy:
    """Between controllers and moto, and the metadata service of every instance (under /imds/INSTANCE)."""

    def __init__(self, moto: Moto, faults: Faults, kill: Callable[[], None]) -> None:
        self.calls: list[tuple[str, Mapping[str, str]]] = []
        self._moto = moto
        self._faults = faults
        self._kill = kill
        self._failed_at: dict[str, float] = {}
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                self.reply(*proxy.post(dict(self.headers), body))

            def do_PUT(self) -> None:
                self.reply(200, b"token")

            def do_GET(self) -> None:
                _, _, instance, path = self.path.split("/", 3)
                self.reply(*proxy.metadata(instance, path.removeprefix("latest/meta-data/")))

            def reply(self, status: int, body: bytes) -> None:
                with suppress(OSError):
                    self.send_response(status)
                    self.send_header("Content-Type", "text/xml")
                    self.send_header("Content-Length", str(len(body)))
                    self.end_headers()
                    self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._server.shutdown()
        self._thread.join(10)
        self._server.server_close()

    def metadata(self, instance: str, path: str) -> tuple[int, bytes]:
        facts = {"instance-id": instance, "instance-type": "t3.micro", "placement/availability-zone": ZONES[0]}
        notice = self._faults.notices.get(instance, {}).get(path)
        value = facts.get(path) or (notice if isinstance(notice, str) or notice is None else json.dumps(notice))
        return (200, value.encode()) if value else (404, b"")

    def post(self, headers: dict[str, str], body: bytes) -> tuple[int, bytes]:
        form = {name: values[0] for name, values in parse_qs(body.decode()).items()}
        action = form["Action"]
        self.calls.append((action, form))
        traps = self._faults.traps.get(action)
        trap = traps.pop(0) if traps else ""
        if trap == "before":
            self._kill()
            return 500, b""
        status, answer = self._answer(action, form, headers, body)
        if trap == "after":
            self._kill()
        return status, answer

    def _answer(self, action: str, form: Mapping[str, str], headers: dict[str, str], body: bytes) -> tuple[int, bytes]:
        if action in self._faults.denied:
            return 403, DENIED
        pool = form.get("AutoScalingGroupName", "").removeprefix("test-")
        if action == "SetDesiredCapacity" and pool in self._faults.short:
            self._faults.short[pool] = int(form["DesiredCapacity"])
            self._failed_at[pool] = time.time()
            return 200, EMPTY.format(action, "").encode()
        if action == "DescribeScalingActivities" and pool in self._faults.short:
            return 200, EMPTY.format(action, f"<Activities>{self._activities(pool)}</Activities>").encode()
        if action == "CompleteLifecycleAction":
            self._faults.waits.discard(form["InstanceId"])
            return 200, EMPTY.format(action, "").encode()
        with httpx.Client(trust_env=False, timeout=10) as client:
            kept = {name: value for name, value in headers.items() if name.lower() not in ("host", "accept-encoding")}
            try:
                answer = client.post(self._moto.url, content=body, headers=kept)
            except httpx.TransportError:
                return 503, b""
        return answer.status_code, self._seen(action, answer.text).encode()

    def _activities(self, pool: str) -> str:
        at = self._failed_at.get(pool)
        if not at:
            return ""
        stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(at + 1))
        facts = {"group": f"test-{pool}", "at": stamp, "kind": "t3.micro"}
        return "".join(ACTIVITY.format(id=uuid4(), zone=zone, **facts) for zone in ZONES)

    def _seen(self, action: str, text: str) -> str:
        """What the groups look like while instances can't be had or a hook holds them."""
        if action != "DescribeAutoScalingGroups":
            return text
        for pool, hosts in self._faults.short.items():
            name = f"<AutoScalingGroupName>test-{pool}</AutoScalingGroupName>"
            pattern = rf"({re.escape(name)}.*?<DesiredCapacity>)\d+"
            text = re.sub(pattern, rf"\g<1>{hosts}", text, flags=re.DOTALL)
        for instance in self._faults.waits:
            pattern = rf"(<InstanceId>{instance}</InstanceId>.*?<LifecycleState>)\w+"
            text = re.sub(pattern, r"\g<1>Terminating:Wait", text, flags=re.DOTALL)
        return text


class Ec2(threading.Thread):
    """Starts an agent for each running instance of a group, and ends it when the instance is terminated."""

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
        while not self._stopping.wait(LOOP_S):
            with suppress(BotoCoreError, ClientError):
                self._match(self._running())
        for process in self.agents.values():
            if process:
                process.kill()
                process.wait(10)

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
            self.moto.start()
            cleanup.callback(self.moto.stop)
            self.valkey.start()
            cleanup.callback(self.valkey.stop)
            self.proxy.start()
            cleanup.callback(self.proxy.stop)
            self._environment = self.environment()
            self.ec2 = Ec2(self.moto, self.faults, self._environment, self.proxy.url, self.folder)
            self.ec2.start()
            cleanup.callback(self.ec2.stop)
            self._keeper.start()
            cleanup.callback(self._stop_controller)
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
        """SIGKILL; the next one starts at once. The lease of a process that is surely dead needs no waiting for."""
        assert self._controller
        self._controller.kill()
        self._controller.wait()
        with redis.Redis.from_url(self.valkey.url) as client:
            client.delete(LEADER)
        self.kills += 1

    def _keep_controller(self) -> None:
        while not self._stopping.wait(LOOP_S):
            if self._controller is None or self._controller.poll() is not None:
                self._controller = self._run("controller", "--provider", "aws")

    def _stop_controller(self) -> None:
        self._stopping.set()
        if self._controller:
            self._controller.terminate()
            self._controller.wait(20)
        self._keeper.join()

    def forgive(self, pool: str = "") -> None:
        """A pool that refused (or all) may be asked again now instead of in half a minute, by the next controller."""
        self.kill_controller()
        with redis.Redis.from_url(self.valkey.url) as client:
            memory = unpack(client.get(FLEET_MEMORY) or pack({}))
            memory["pools"] = {name: row for name, row in memory.get("pools", {}).items() if pool and name != pool}
            client.set(FLEET_MEMORY, pack(memory))

    def client(self) -> Client:
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
            return client.submit("work", value)["id"]

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
        cleanup.callback(lambda: (process.terminate(), process.wait(20)))
        self.url = f"http://127.0.0.1:{port}"
        until(lambda: answers(self.url), "the gateway")

    def _run(self, name: str, *arguments: str) -> subprocess.Popen[bytes]:
        with open(self.folder / f"{name}.log", "ab") as log:
            environment = {**self._environment, **parent_mark(os.getpid())}
            return subprocess.Popen([*CLI, name, *arguments], env=environment, stdout=log, stderr=log)
