"""What a device did and what its tenants' books say they had are the same time: with models that take turns, requests
that are given up, and an engine process that dies."""

import os
import random
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest

from benchmarks.models import random_model
from stoker.runtime.local import LocalStack
from stoker.runtime.publishing import push_model
from tests.e2e.test_shared_device import APP, NAMES, ONE_AT_A_TIME_GB

pytestmark = pytest.mark.xdist_group("shared-device")

PARTS = ("prefill_seconds", "decode_seconds", "swap_seconds")


def ask(stack: LocalStack, seed: int) -> None:
    """One in five is given up before its end."""
    order = random.Random(seed)
    prompt = " ".join(f"w{order.randrange(500)}" for _ in range(order.randrange(1, 60)))
    body = {"model": order.choice(NAMES), "prompt": prompt, "max_tokens": order.randrange(1, 200), "temperature": 0}
    given_up = order.random() < 0.2
    try:
        response = httpx.post(f"{stack.url}/v1/completions", json=body, timeout=0.2 if given_up else 120)
    except httpx.TimeoutException:
        assert given_up
    else:
        assert response.status_code == 200, response.text


def ask_all(stack: LocalStack, seeds: range) -> None:
    with ThreadPoolExecutor(12) as threads:
        list(threads.map(lambda seed: ask(stack, seed), seeds))


def device_time(stack: LocalStack) -> dict[str, float]:
    """Seconds by kind, from the gateway's metrics."""
    lines = httpx.get(f"{stack.url}/metrics").text.splitlines()
    found = [line for line in lines if line.startswith("stoker_device_seconds_total{")]
    return {line.split('kind="')[1].partition('"')[0]: float(line.split()[-1]) for line in found}


def booked(stack: LocalStack) -> float:
    """Seconds that tenants were charged with."""
    rows = httpx.get(f"{stack.url}/v1/usage").json()["data"]
    return sum(row[part] for row in rows for part in PARTS)


def settled(value: Callable[[], float]) -> float:
    """Once it has not changed for as long as reports and books take."""
    last, since = value(), time.monotonic()
    while time.monotonic() - since < 2.5:
        time.sleep(0.25)
        if (now := value()) != last:
            last, since = now, time.monotonic()
    return last


def kill_engine(stack: LocalStack) -> None:
    (engine,) = [child for child in psutil.Process(stack.pid).children(recursive=True) if "engine" in child.name()]
    os.kill(engine.pid, signal.SIGKILL)


def test_what_tenants_were_charged_and_what_nobody_was_is_all_there_was(tmp_path: Path) -> None:
    models = {}
    for seed, name in enumerate(NAMES):
        models[name] = (tmp_path / "store" / name).as_uri()
        push_model(random_model("tiny", tmp_path / name, seed), models[name])
    app = tmp_path / "several.py"
    app.write_text(APP.format(models=models))
    with LocalStack(tmp_path / "data", env={"STOKER_DEVICE_MEMORY_GB": ONE_AT_A_TIME_GB}) as stack:
        stack.deploy(app)
        ask_all(stack, range(60))
        charged, spent = settled(lambda: booked(stack)), device_time(stack)
        slack = 0.01 * wall(spent)
        assert charged > 0 and spent["lost"] == 0
        assert abs(charged - spent["charged"]) <= slack
        # All that was computed is somebody's, and no swap is charged twice.
        computed = spent["busy"] - spent["wasted"]
        assert computed - slack <= charged <= computed + spent["swap"] + slack

        with ThreadPoolExecutor(1) as thread:
            asking = thread.submit(ask_all, stack, range(100, 140))
            time.sleep(1.0)
            kill_engine(stack)
            asking.result()
        charged, spent = settled(lambda: booked(stack)), device_time(stack)
        assert spent["lost"] > 0
        assert charged <= spent["charged"] + spent["lost"]
        assert charged <= spent["busy"] - spent["wasted"] + spent["swap"] + spent["lost"]


def wall(spent: dict[str, float]) -> float:
    return sum(spent[kind] for kind in ("busy", "swap", "load", "idle", "lost"))
