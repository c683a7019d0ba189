"""Models with adapters take turns on a device that holds one of them: a real engine process, adapters by file."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stoker.runtime.adapters.slot_memory import sizes_of, slot_numbers
from stoker.runtime.engine.request import GenerationRequest, SamplingParams
from tests.runtime.adapters.folders import file_of, merged, random_folder
from tests.runtime.engine.agent_side import GREEDY, Agent, store_of
from tests.runtime.engine.conftest import TinyModel
from tests.runtime.pool.test_swapping import PAGE, assert_nothing_is_lost, files

NAMES = ("one", "two")
SLOTS: dict[str, Any] = {"adapter_slots": 2, "adapter_rank": 8}
ONE_AT_A_TIME = 7 * PAGE


@pytest.fixture
def agent() -> Iterator[Agent]:
    agent = Agent(ONE_AT_A_TIME)
    yield agent
    assert agent.close() == 0


def frame_of(folder: Path) -> dict[str, Any]:
    file = file_of(folder)
    fields = {"revision": file.revision, "path": file.path, "digest": file.digest}
    return {**fields, "rank": file.config.rank, "scale": file.config.scale}


def alone(model: TinyModel, prompt: list[int]) -> list[int]:
    return model.engine().generate([GenerationRequest("r", prompt, SamplingParams(**GREEDY))])["r"]


def test_their_copies_in_host_memory_are_told_of(agent: Agent, tmp_path: Path) -> None:
    model = TinyModel.random(0)
    url = store_of(tmp_path, model)
    agent.announce("one", url, files=files(url), num_blocks=0, **SLOTS)
    config = model.config
    numbers = slot_numbers(sizes_of(config), 16)
    assert agent.expect("ready")["facts"]["host_bytes"] == 2 * 4 * numbers
    agent.expect("loaded")


def test_adapters_answer_as_merged_models_whatever_had_the_device_meanwhile(agent: Agent, tmp_path: Path) -> None:
    models = {name: TinyModel.random(seed) for seed, name in enumerate(NAMES)}
    folders = [random_folder(tmp_path / f"adapter {seed}", models["one"].hf_config, seed) for seed in range(3)]
    for name, model in models.items():
        url = store_of(tmp_path / name, model)
        agent.announce(name, url, files=files(url), num_blocks=0, **SLOTS)
        for kind in ("allocated", "ready", "loaded"):
            assert agent.expect(kind)["model"] == name
    assert agent.stats()["there"] == ["two"], "there is room for one of them with its slots"
    order, wanted = random.Random(3), {}
    for number in range(40):
        name, folder = order.choice(NAMES), order.choice([None, *folders])
        prompt = [order.randrange(97) for _ in range(order.randrange(1, 40))]
        model = merged(models[name], folder) if folder else models[name]
        wanted[f"r{number}"] = (alone(model, prompt), "length", "")
        agent.submit(name, f"r{number}", prompt, **({"adapter": frame_of(folder)} if folder else {}))
        if number % 8 == 7:
            assert agent.answers(*wanted) == wanted
            wanted = {}
    stats = agent.stats()
    assert stats["swaps"]["count"] > 3 and all(model["adapter_loads"] > 3 for model in stats["models"].values())
    assert_nothing_is_lost(agent)


def test_slots_count_as_memory(tmp_path: Path) -> None:
    """A model that fits without them is refused with too many."""
    agent, model = Agent(ONE_AT_A_TIME), TinyModel.random()
    url = store_of(tmp_path / "store", model)
    agent.announce("wide", url, files=files(url), num_blocks=0, adapter_slots=16, adapter_rank=16)
    error = agent.expect("load_error")["error"]
    assert error["type"] == "out_of_memory" and "short of" in error["message"]
    assert agent.close() == 0
