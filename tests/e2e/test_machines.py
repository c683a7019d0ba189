"""Several machines without a cloud: `stoker worker` on each, one queue, one controller, one gateway."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from stoker.queue.embedded import EmbeddedValkey
from stoker.runtime.client.client import Client
from stoker.runtime.deployment import deploy
from stoker.runtime.processes import parent_mark
from stoker.runtime.supervisor import check_port
from tests.children import end
from tests.e2e.aws_api import answers, until
from tests.e2e.cloud import APP, CLI, WITHOUT_ENGINE

pytestmark = pytest.mark.xdist_group("aws")


@pytest.fixture
def client(tmp_path: Path) -> Iterator[Client]:
    """Of a gateway whose cluster has the hosts "one" and "two"."""
    (tmp_path / "sitecustomize.py").write_text(WITHOUT_ENGINE)
    (tmp_path / "app.py").write_text(APP.replace("idle_timeout=0.5", "idle_timeout=30, max_replicas=2"))
    port = check_port("127.0.0.1", 0)
    with ExitStack() as cleanup:
        valkey = EmbeddedValkey(tmp_path / "valkey")
        valkey.start()
        cleanup.callback(valkey.stop)
        path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
        settings = {"STOKER_REDIS": valkey.url, "STOKER_STORE": (tmp_path / "store").as_uri(), "PYTHONPATH": path}

        def run(name: str, *arguments: str, data: str = "data") -> None:
            environment = {**os.environ, **settings, **parent_mark(os.getpid()), "STOKER_DATA": str(tmp_path / data)}
            with open(tmp_path / f"{name}{data}.log", "ab") as log:
                process = subprocess.Popen([*CLI, name, *arguments], env=environment, stdout=log, stderr=log)
            cleanup.callback(end, process, 45)

        run("gateway", "--host", "127.0.0.1", "--port", str(port))
        run("controller")
        for host in ("one", "two"):
            run("worker", "--host-id", host, data=host)
        until(lambda: answers(f"http://127.0.0.1:{port}"), "the gateway")
        client = cleanup.enter_context(Client(f"http://127.0.0.1:{port}"))
        deploy(tmp_path / "app.py", client)
        until(lambda: len(client.hosts()["hosts"]) == 2, "both hosts to report")
        yield client


def replicas(client: Client) -> dict[str, int]:
    return {row["id"]: row["replicas"] for row in client.hosts()["hosts"] if row["state"] == "ready"}


def test_replicas_spread_over_the_machines(client: Client, tmp_path: Path) -> None:
    gates = [tmp_path / "gate1", tmp_path / "gate2"]
    jobs = [client.spawn("work", str(gate)).id for gate in gates]
    until(lambda: all(client.job(job)["state"] == "running" for job in jobs), "both jobs to run")
    until(lambda: replicas(client) == {"one": 1, "two": 1}, "a replica on each", 10)
    for gate in gates:
        gate.touch()
    until(lambda: all(client.job(job)["state"] == "succeeded" for job in jobs), "both answers")


def test_a_version_that_is_replaced_finishes_what_it_runs(client: Client, tmp_path: Path) -> None:
    app, gate = tmp_path / "app.py", tmp_path / "gate"
    job = client.spawn("work", str(gate)).id
    until(lambda: client.job(job)["state"] == "running", "the job to run")
    app.write_text(app.read_text().replace("return gate", "return gate + '!'"))
    deploy(app, client)
    assert client.invoke("work", "") == "!", "the new version answers beside it"
    assert client.job(job)["state"] == "running"
    gate.touch()
    assert until(lambda: client.job(job)["state"] == "succeeded" and client.job(job), "its answer")["attempt"] == 1
