"""Hosts from zero and back to zero, with the real controller on a real Auto Scaling API (moto) and real host agents."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.e2e.cloud import Cloud, until

pytestmark = pytest.mark.xdist_group("aws")

APP = """
import time

import stoker

app = stoker.App("work")


@app.function(idle_timeout=0.5)
def work(seconds: float) -> float:
    time.sleep(seconds)
    return seconds
"""


@pytest.fixture(scope="module")
def cloud(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cloud]:
    folder = tmp_path_factory.mktemp("aws")
    (folder / "app.py").write_text(APP)
    with Cloud(folder) as cloud:
        cloud.moto.make_group("cheap", price=0.1)
        cloud.moto.make_group("dear", price=0.5)
        cloud.deploy(folder / "app.py")
        yield cloud


def test_a_request_takes_the_group_from_zero_to_one_and_back(cloud: Cloud) -> None:
    assert cloud.moto.instances("cheap") == []
    with cloud.client() as client:
        job = client.submit("work", 0.1)
        until(lambda: cloud.moto.instances("cheap"), "an instance")
        until(lambda: "starting host" in (client.job(job["id"])["wait_reason"] or ""), "the reason", 5)
        until(lambda: client.job(job["id"])["state"] == "succeeded", "the answer")
        fleet = cloud.hosts()
    print(fleet)
    until(lambda: not cloud.moto.instances("cheap") and not cloud.moto.group("cheap")["DesiredCapacity"], "no instance")
