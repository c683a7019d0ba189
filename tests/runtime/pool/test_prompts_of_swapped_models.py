"""Kept prompts of models that take turns on a device: a real engine process with little memory, on a CPU."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from stoker.runtime.engine.request import GenerationRequest, SamplingParams
from stoker.runtime.pool.prompt_file import seal
from tests.runtime.engine.agent_side import GREEDY, Agent, store_of
from tests.runtime.engine.conftest import TinyModel

from .test_swapping import ONE_AT_A_TIME, files

HOST_BYTES = 1 << 18


@pytest.fixture(scope="module")
def models() -> dict[str, TinyModel]:
    return {name: TinyModel.random(seed) for seed, name in enumerate(("one", "two"))}


@pytest.fixture(scope="module")
def urls(models: dict[str, TinyModel], tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return {name: store_of(tmp_path_factory.mktemp(name), model) for name, model in models.items()}


@pytest.fixture
def kept(urls: dict[str, str], tmp_path: Path) -> Path:
    """What model "one" leaves: two blocks that two requests had in common."""
    path, agent = tmp_path / "kept", Agent(ONE_AT_A_TIME)
    load(agent, "one", urls["one"])
    for number in range(2):
        ask(agent, "one", number)
    assert export(agent, path) == 2
    seal(path, b"k")
    assert agent.close() == 0
    return path


@pytest.fixture
def agent() -> Iterator[Agent]:
    agent = Agent(ONE_AT_A_TIME)
    yield agent
    assert agent.close() == 0


def load(agent: Agent, name: str, url: str, host_cache_bytes: int = 0) -> None:
    agent.announce(name, url, files=files(url), num_blocks=0, host_cache_bytes=host_cache_bytes)
    for kind in ("allocated", "ready", "loaded"):
        assert agent.expect(kind)["model"] == name


def prompt(number: int) -> list[int]:
    """What numbers below 100 have in common is two blocks and a bit, and so it is above."""
    return [(3 + number // 100 + 7 * i) % 97 for i in range(36)] + [(number + 5 * i) % 97 for i in range(6)]


def ask(agent: Agent, model: str, number: int) -> tuple[list[int], int]:
    """The tokens, and how many of the prompt's came from a cache."""
    agent.submit(model, f"{model}{number}", prompt(number))
    tokens: list[int] = []
    while True:
        for _, new, reason, error, _, cached, *_ in agent.expect("deltas")["items"]:
            tokens += new
            assert not error
            if reason:
                return tokens, cached


def export(agent: Agent, path: Path) -> int:
    fields = {"bytes": 1 << 20, "bytes_s": 0.0, "within_s": 30.0, "made_for": {}}
    agent.send({"t": "export prompts", "model": "one", "path": str(path), **fields})
    return answered(agent)


def restore(agent: Agent, path: Path) -> int:
    agent.send({"t": "import prompts", "model": "one", "path": str(path)})
    return answered(agent)


def answered(agent: Agent) -> int:
    answer = agent.expect("prompts")
    assert answer["model"] == "one" and not answer["error"]
    return answer["blocks"]


def alone(model: TinyModel, number: int) -> list[int]:
    return model.engine().generate([GenerationRequest("r", prompt(number), SamplingParams(**GREEDY))])["r"]


def test_a_woken_model_finds_them_and_loses_them_with_the_device(
    agent: Agent, kept: Path, urls: dict[str, str], models: dict[str, TinyModel]
) -> None:
    load(agent, "one", urls["one"])
    assert restore(agent, kept) == 2
    assert ask(agent, "one", 5) == (alone(models["one"], 5), 32)
    load(agent, "two", urls["two"])
    assert agent.stats()["there"] == ["two"]
    assert export(agent, kept.with_name("other")) == 0
    assert restore(agent, kept) == 0, "there is no room while it is away"
    assert ask(agent, "one", 6) == (alone(models["one"], 6), 0)


def test_one_that_is_away_leaves_and_finds_them_in_host_memory(
    agent: Agent, kept: Path, urls: dict[str, str], models: dict[str, TinyModel]
) -> None:
    load(agent, "one", urls["one"], HOST_BYTES)
    load(agent, "two", urls["two"])
    assert agent.stats()["there"] == ["two"]
    assert restore(agent, kept) == 2
    assert agent.stats()["there"] == ["two"]
    for number in (5, 6):
        assert ask(agent, "one", number) == (alone(models["one"], number), 32)
    ask(agent, "two", 1)
    assert agent.stats()["there"] == ["two"]
    assert export(agent, kept.with_name("other")) == 0, "what was kept is what it has"
    for number in (105, 106):
        ask(agent, "one", number)
    ask(agent, "two", 2)
    assert agent.stats()["there"] == ["two"]
    assert export(agent, kept.with_name("other")) == 4


def test_a_model_may_be_swapped_out_while_they_come_and_go(
    agent: Agent, kept: Path, urls: dict[str, str], models: dict[str, TinyModel]
) -> None:
    for name in ("two", "one"):
        load(agent, name, urls[name])
    for number in range(12):
        agent.send({"t": "import prompts", "model": "one", "path": str(kept)})
        assert ask(agent, "two", number)[0] == alone(models["two"], number)
        assert ask(agent, "one", number)[0] == alone(models["one"], number)
        path = kept.with_name(f"file{number}")
        agent.send({"t": "export prompts", "model": "one", "path": str(path), "bytes": 1 << 20, "bytes_s": 0.0,
                    "within_s": 30.0, "made_for": {}})  # fmt: skip
        assert ask(agent, "two", 20 + number)[0] == alone(models["two"], 20 + number)
        for _ in range(2):
            answered(agent)
    stats = agent.stats()["models"]
    assert all(stats[name]["used_blocks"] == 0 for name in stats)
