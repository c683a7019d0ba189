"""A tenant that stays within its share hardly notices another one that asks for more than the device can do. The engine
is the real one, on a CPU; what its steps take is counted on a clock of the test's own, so that no neighbour on the
machine matters."""

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from stoker.coldstart.file_store import FileStore
from stoker.coldstart.manifest import read_manifest
from stoker.coldstart.ring import Ring
from stoker.coldstart.timeline import Timeline
from stoker.runtime.engine import engine as engine_module
from stoker.runtime.engine.engine import Engine
from stoker.runtime.engine.models import Models
from stoker.runtime.wire import Frame
from tests.runtime.engine.agent_side import GREEDY, store_of
from tests.runtime.engine.conftest import TinyModel

STEP_NS, TOKEN_NS = 1_000_000, 250_000
QUIET, FLOOD = 15, 12


class Clock:
    """Time passes while steps are computed, and when the test says so."""

    now = 10**9

    def monotonic_ns(self) -> int:
        return self.now


def even(tokens: int) -> int:
    return STEP_NS + TOKEN_NS * tokens


def dear(tokens: int) -> int:
    """As where one row is a product with a vector, and more are one with a matrix."""
    return 12_000_000 if tokens == 1 else 20_000_000 + 600_000 * tokens


class Device:
    """Two models in one process. Requests of a flood are always waiting; the quiet tenant's come one by one."""

    def __init__(self, clock: Clock, urls: dict[str, str]) -> None:
        self.clock = clock
        self.step_ns = even
        self.ring = Ring.create(1)
        self.inbox: list[Frame] = []
        self.ended: dict[str, int] = {}
        self.charged = Counter[str]()
        self.loaded: set[str] = set()
        self.models = Models(self._take, self.ring, self.inbox.append, Timeline(), 64 << 20)
        self.models._books.meter._clock = clock.monotonic_ns
        self.models._books.meter._at = clock.now
        self.models._books.meter.began_ns = clock.now
        for name, url in urls.items():
            self._load(name, Path(url.removeprefix("file://")))
        self.number = 0

    def _load(self, name: str, folder: Path) -> None:
        store = FileStore(folder)
        manifest = read_manifest(store)
        files = [str(folder / entry.name) for entry in manifest.files]
        options = {"max_seqs": 8, "max_model_len": 96, "prefix_cache": False}
        documents = {"config.json": store.read("config.json")}
        body = {"manifest": manifest.pack(), "documents": documents, "options": options, "files": files}
        self._send({"t": "load", "model": name, **body})
        while name not in self.loaded:
            while self.inbox:
                self.models.handle(self.inbox.pop(0))
        engine = self.models.engine(name)
        assert isinstance(engine, Engine)
        engine.runner.launch = self._counting(engine.runner.launch)  # type: ignore[method-assign]

    def _counting(self, launch: Callable[..., Any]) -> Callable[..., Any]:
        def counted(work: Any) -> Any:
            self.clock.now += self.step_ns(sum(item.count for item in work))
            return launch(work)

        return counted

    def _send(self, frame: Frame) -> None:
        if not self.models.route(frame):
            self.models.handle(frame)

    def _take(self, frame: Frame) -> None:
        if frame["t"] == "loaded":
            self.loaded.add(frame["model"])
        if frame["t"] == "deltas":
            for id, _, reason, *_, charge in frame["items"]:
                if reason:
                    self.ended[id] = self.clock.now
                    self.charged[id.rstrip("0123456789")] += sum(charge)

    def ask(self, model: str, tenant: str, prompt: int, tokens: int, weight: float = 1.0) -> str:
        self.number += 1
        id = f"{tenant}{self.number}"
        body = {"prompt": [self.number % 90] * prompt, "params": {**GREEDY, "max_tokens": tokens}, "prior": []}
        self._send({"t": "submit", "model": model, "id": id, "salt": tenant.encode(), "weight": weight, **body})
        return id

    def keep_busy(self, tenants: dict[str, tuple[str, float]], seconds: float) -> None:
        """Each tenant always has requests waiting: for the model and with the weight that are given."""
        until = self.clock.now + seconds * 1e9
        asked: dict[str, set[str]] = {tenant: set() for tenant in tenants}
        while self.clock.now < until:
            for tenant, (model, weight) in tenants.items():
                asked[tenant] = {id for id in asked[tenant] if id not in self.ended}
                while len(asked[tenant]) < FLOOD:
                    asked[tenant].add(self.ask(model, tenant, 20, 12, weight))
            self.models.step()
        for tenant, (model, _) in tenants.items():
            for id in asked[tenant]:
                self._send({"t": "abort", "model": model, "id": id})

    def quiet_latencies(self, flooded: str, tokens: int = 12) -> list[int]:
        """Nanoseconds of requests with pauses as long. With a `flooded` model, a noisy tenant keeps it full."""
        found: list[int] = []
        flood: set[str] = set()
        due, current, asked = self.clock.now, "", 0
        while len(found) < QUIET:
            flood = {id for id in flood if id not in self.ended}
            while flooded and len(flood) < FLOOD:
                flood.add(self.ask(flooded, "noisy", 40, 50))
            if not current and self.clock.now >= due:
                current, asked = self.ask("one", "quiet", 20, tokens), self.clock.now
            self.clock.now = self.clock.now if self.models.wait_s() == 0 else due
            self.models.step()
            if current in self.ended:
                found.append(self.ended[current] - asked)
                due, current = self.clock.now + found[-1], ""
        for id in flood:
            self._send({"t": "abort", "model": flooded, "id": id})
        return found

    def had(self, tenant: str) -> float:
        return self.models._books.shares.level(tenant)

    def close(self) -> None:
        for name in self.loaded:
            self._send({"t": "unload", "model": name})
        self.ring.close()


@pytest.fixture(scope="module")
def urls(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    names = ("one", "two")
    return {name: store_of(tmp_path_factory.mktemp(name), TinyModel.random(i)) for i, name in enumerate(names)}


@pytest.fixture
def device(urls: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    clock = Clock()
    monkeypatch.setattr(engine_module, "time", clock)
    device = Device(clock, urls)
    yield device
    device.close()


@pytest.mark.parametrize("flooded", ["one", "two"])
def test_a_flood_makes_the_quiet_tenants_slowest_answer_half_as_slow_again_at_most(
    device: Device, flooded: str
) -> None:
    alone = device.quiet_latencies("")
    began, before = device.clock.now, device.had("noisy")
    device.quiet_latencies(flooded)
    beside = device.quiet_latencies(flooded)
    assert max(beside) <= 1.5 * max(alone)
    spent = (device.clock.now - began) / 1e9
    assert device.had("noisy") - before >= 0.3 * spent, "nor is the flood kept waiting for nothing"


def test_also_where_a_second_row_nearly_doubles_a_step(device: Device) -> None:
    device.step_ns = dear
    alone = device.quiet_latencies("", 40)
    began, before = device.clock.now, device.had("noisy")
    device.quiet_latencies("one", 40)
    beside = device.quiet_latencies("one", 40)
    assert max(beside) <= 1.5 * max(alone)
    assert device.had("noisy") - before >= 0.3 * (device.clock.now - began) / 1e9


@pytest.mark.parametrize("models", [("one", "one"), ("one", "two")])
def test_tenants_that_always_wait_have_the_device_by_their_weights(device: Device, models: tuple[str, str]) -> None:
    device.keep_busy({"three": (models[0], 3.0), "single": (models[1], 1.0)}, 1.0)
    before = {tenant: device.charged[tenant] for tenant in ("three", "single")}
    device.keep_busy({"three": (models[0], 3.0), "single": (models[1], 1.0)}, 8.0)
    three, single = (device.charged[tenant] - before[tenant] for tenant in ("three", "single"))
    assert abs(three / single - 3) <= 0.15, (three, single)
