"""A replica's prompts, with a real store and an engine that only says that it did what it was asked."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stoker.coldstart.failures import StoreUnavailable
from stoker.coldstart.store import open_store
from stoker.coldstart.timeline import Timeline
from stoker.runtime.pool.prompt_file import Row, pack_head
from stoker.runtime.settings import Settings
from stoker.runtime.spec import FunctionSpec, ModelOptions, Scaling
from stoker.runtime.stored_prompts import object_key
from stoker.runtime.wire import Frame
from stoker.runtime.worker import own_prompts
from stoker.runtime.worker.engine_link import EngineDied
from stoker.runtime.worker.own_prompts import OwnPrompts
from stoker.runtime.worker.prompt_store import PromptStore

SPEC = FunctionSpec("chat", "llm", born="1", weights="file:///m")
COMPUTED = {"block_bytes": 100, "block_tokens": 2}
WORTH_S = 0.2


@dataclass
class Cluster:
    deployed: FunctionSpec | None = SPEC
    now: int = 0

    async def era(self) -> int:
        return self.now

    async def function(self, name: str) -> dict[str, Any] | None:
        return self.deployed.to_dict() if self.deployed else None


@dataclass
class Engine:
    """`blocks` are what it exports; None: it never answers."""

    blocks: int | None = 2
    asked: list[Frame] = field(default_factory=list)
    owner: OwnPrompts | None = None

    def send(self, frame: Frame) -> None:
        self.asked.append(frame)
        if self.blocks is None:
            return
        if frame["t"] == "export prompts":
            rows = [Row(bytes([n]) * 32, n - 1, 1, b"12345678") for n in range(self.blocks)]
            Path(frame["path"]).write_bytes(
                pack_head(frame["made_for"], COMPUTED, rows, WORTH_S) + bytes(100 * self.blocks)
            )
        else:
            assert Path(frame["path"]).exists()
        assert self.owner
        self.owner.told({"t": "prompts", "path": frame["path"], "blocks": self.blocks, "error": ""})


class World:
    def __init__(self, tmp_path: Path) -> None:
        self.cluster, self.engine = Cluster(), Engine()
        self.store = PromptStore(open_store((tmp_path / "store").as_uri()), tmp_path / "scratch", b"k" * 32, 1 << 20)
        self.settings = Settings(tmp_path)

    def replica(self, spec: FunctionSpec = SPEC, is_ready: bool = True) -> OwnPrompts:
        host: Any = SimpleNamespace(settings=self.settings, cluster=self.cluster, prompts=self.store)
        accepting = asyncio.get_running_loop().create_future()
        if is_ready:
            accepting.set_result(None)
        link: Any = self.engine
        self.engine.owner = own = OwnPrompts("chat-1", spec, host, link, accepting)
        return own

    async def life(self, spec: FunctionSpec = SPEC, name: str = "m") -> Timeline:
        """From waking to sleep."""
        own, timeline = self.replica(spec), Timeline()
        own.begin(name, timeline)
        await until(lambda: own._restoring is not None and own._restoring.done())
        await own.keep(await own.export(True))
        assert list(self.store.folder.glob("*")) == []
        return timeline

    @property
    def kinds(self) -> list[str]:
        return [frame["t"] for frame in self.engine.asked]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.005)


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


async def test_what_one_life_leaves_the_next_one_finds(world: World) -> None:
    assert (await world.life()).records() == []
    timeline = await world.life()
    assert world.kinds == ["export prompts", "import prompts", "export prompts"]
    fetched, restored = timeline.records()
    assert (fetched["name"], restored["name"], restored["blocks"]) == ("fetch prompts", "restore prompts", 2)


async def test_another_version_with_the_same_model_goes_on_with_it(world: World) -> None:
    await world.life()
    world.cluster.deployed = newer = replace(SPEC, version="2", scaling=Scaling(max_replicas=3))
    await world.life(newer)
    assert "import prompts" in world.kinds


@pytest.mark.parametrize(
    "change",
    [{"born": "2"}, {"weights": "file:///other"}, {"model": ModelOptions(max_model_len=99)}],
    ids=lambda change: next(iter(change)),
)
async def test_a_replica_of_what_is_not_deployed_any_more_keeps_nothing(world: World, change: dict[str, Any]) -> None:
    world.cluster.deployed = replace(SPEC, **change)
    await world.life()
    world.cluster.deployed = None
    await world.life()
    assert world.engine.asked == [] and world.store.find("chat") is None


async def test_other_models_and_other_functions_of_the_name_find_nothing(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    await world.life()
    world.engine.asked.clear()
    world.engine.blocks = 0
    await world.life(name="other revision")
    world.cluster.deployed = reborn = replace(SPEC, born="2")
    await world.life(reborn)
    assert "import prompts" not in world.kinds
    assert "its model is 'm', not 'other revision'" in caplog.text and "its born is '1', not '2'" in caplog.text


async def test_after_a_tenant_was_removed_nothing_from_before_is_found_or_kept(world: World) -> None:
    await world.life()
    woke_before = world.replica()
    woke_before.begin("m", Timeline())
    await until(lambda: "import prompts" in world.kinds)
    kept = world.store.store.read(object_key("chat"))
    world.cluster.now = 1
    world.engine.asked.clear()
    assert await woke_before.export(True) is None
    await world.life()
    assert world.kinds == ["export prompts"] and world.store.store.read(object_key("chat")) != kept


@pytest.mark.parametrize("spec", [replace(SPEC, model=ModelOptions(prefix_cache=False)), replace(SPEC, kind="embed")])
async def test_who_has_no_prompt_cache_keeps_none(world: World, spec: FunctionSpec) -> None:
    own = world.replica(spec)
    own.begin("m", Timeline())
    assert own._restoring is None and await own.export(True) is None and world.engine.asked == []


async def test_an_operator_may_keep_none(world: World) -> None:
    world.settings = world.settings.with_(prompt_cache_mb=0)
    own = world.replica()
    own.begin("m", Timeline())
    assert own._restoring is None and await own.export(True) is None


async def test_one_that_does_not_fall_asleep_keeps_nothing(world: World) -> None:
    own = world.replica()
    own.begin("m", Timeline())
    await until(lambda: bool(own._made_for))
    assert await own.export(False) is None and world.engine.asked == []


async def test_weights_have_the_wires_first(world: World) -> None:
    await world.life()
    feed: Any = SimpleNamespace(is_under_way=False, bytes_s=0.0)
    found: list[str] = []
    find = world.store.find
    world.store.find = lambda function: (found.append(function), find(function))[1]  # type: ignore[method-assign]
    own = world.replica()
    own.begin("m", Timeline(), feed)
    await own.settle()
    await asyncio.sleep(0.1)
    assert found == []
    feed.is_under_way = True
    await until(lambda: "import prompts" in world.kinds)
    assert found == ["chat"]


async def test_the_rate_of_the_weights_stands_for_the_stores_until_that_is_known(world: World) -> None:
    feed: Any = SimpleNamespace(is_under_way=True, bytes_s=5e9)
    own = world.replica()
    own.begin("m", Timeline(), feed)
    await until(lambda: own._restoring is not None and own._restoring.done())
    await own.export(True)
    world.store.bytes_s = 1e9
    await own.export(True)
    assert [frame["bytes_s"] for frame in world.engine.asked] == [5e9, 1e9]


async def test_first_requests_wait_as_long_as_computing_would_take_and_no_longer(world: World) -> None:
    await world.life()
    own = world.replica(is_ready=False)
    own.begin("m", Timeline())
    await until(lambda: own._hold_s > 0)
    began = time.monotonic()
    await own.settle()
    assert 0.15 < time.monotonic() - began < 5
    own._accepting.set_result(None)
    own._hold_s = 60.0
    await own.settle()
    assert world.kinds[-1] == "import prompts"


async def test_they_never_wait_for_long(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_prompts, "MOST_HOLD_S", 0.01)
    await world.life()
    own = world.replica(is_ready=False)
    own.begin("m", Timeline())
    await until(lambda: own._hold_s > 0)
    assert own._hold_s == 0.01
    await own.close()


async def test_they_do_not_wait_for_a_store_that_is_known_to_be_slow(world: World) -> None:
    await world.life()
    world.store.bytes_s = 10.0
    own = world.replica(is_ready=False)
    own.begin("m", Timeline())
    await until(lambda: any(path.is_file() for path in world.store.folder.glob("*")))
    assert own._hold_s == 0
    await own.settle()
    await own.close()


async def test_sleep_waits_for_no_engine_and_no_store(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(own_prompts, "EXPORT_S", 0.2)
    own, world.engine.blocks = world.replica(), None
    own.begin("m", Timeline())
    await until(lambda: own._restoring is not None and own._restoring.done())
    began = time.monotonic()
    assert await own.export(True) is None
    assert time.monotonic() - began < 5 and "took more than 0.2 s" in caplog.text
    world.engine.blocks = 2
    path = await own.export(True)
    keep = world.store.keep
    world.store.keep = lambda *given: (time.sleep(1.0), keep(*given))[1]  # type: ignore[method-assign]
    began = time.monotonic()
    await own.keep(path)
    assert time.monotonic() - began < 0.9 and world.store.find("chat") is None
    await until(lambda: world.store.find("chat") is not None)


@pytest.mark.parametrize("failure", [StoreUnavailable("o", None, "away"), OSError("full"), EngineDied("gone")])
async def test_no_failure_reaches_the_replica(
    world: World, failure: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any) -> Any:
        raise failure

    await world.life()
    if isinstance(failure, EngineDied):
        monkeypatch.setattr(world.engine, "send", fail)
    else:
        monkeypatch.setattr(world.store.store, "stat", fail)
        monkeypatch.setattr(world.store.store, "write", fail)
    await world.life()
    assert caplog.text.count(str(failure)) == 2


async def test_a_replica_that_stops_while_it_wakes_leaves_nothing_behind(world: World) -> None:
    await world.life()
    own = world.replica(is_ready=False)
    own.begin("m", Timeline())
    await until(lambda: own._hold_s > 0)
    assert await own.export(False) is None
    assert own._restoring is not None and own._restoring.done()
    assert list(world.store.folder.iterdir()) == []
