"""The API side of a cloud for tests: moto holds the Auto Scaling groups, and a proxy before it fails on demand."""

import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs
from uuid import uuid4

import boto3
import httpx
from botocore.config import Config

from tests.children import end
from tests.conftest import S3_SERVER

KEYS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1"}
FACTS = {"aws_access_key_id": "test", "aws_secret_access_key": "test", "region_name": "us-east-1"}
ZONES = ["us-east-1a", "us-east-1b"]
CHANGES = {"SetDesiredCapacity", "SetInstanceProtection", "TerminateInstanceInAutoScalingGroup"}
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
        self._clients: dict[str, Any] = {}
        self._making = threading.Lock()

    def start(self) -> None:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        self._process = subprocess.Popen([sys.executable, "-c", S3_SERVER], text=True, **pipes)  # type: ignore[call-overload]
        assert self._process and self._process.stdout
        with self._making:
            self.url = f"http://127.0.0.1:{int(self._process.stdout.readline())}"
            self._clients.clear()

    def stop(self) -> None:
        """At once, whatever it is answering."""
        if self._process and self._process.stdin and self._process.stdout:
            end(self._process, 0)
            self._process.stdin.close()
            self._process.stdout.close()

    def client(self, service: str) -> Any:
        """Threads may share a client, but not make two at a time. A call that is cut off fails soon."""
        config = Config(connect_timeout=1, read_timeout=20, retries={"mode": "standard", "total_max_attempts": 2})
        with self._making:
            if service not in self._clients:
                self._clients[service] = boto3.client(service, endpoint_url=self.url, config=config, **FACTS)
            return self._clients[service]

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
    `cut`: operations whose answers break off. `short`: pools that have no capacity, and how many hosts they were asked
    for. `notices`: by instance, for IMDS."""

    traps: dict[str, list[str]] = field(default_factory=dict)
    short: dict[str, int] = field(default_factory=dict)
    notices: dict[str, dict[str, Any]] = field(default_factory=dict)
    waits: set[str] = field(default_factory=set)
    denied: set[str] = field(default_factory=set)
    cut: set[str] = field(default_factory=set)
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
        if action in self._faults.cut:
            return 200, f"<{action}Response>".encode()
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
