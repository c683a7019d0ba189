"""Models that don't fit on a device together take turns there: a real engine process with little memory, on a CPU."""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from stoker.coldstart.publish import publish
from stoker.coldstart.store import open_store
from stoker.runtime.encoder import bert
from stoker.runtime.encoder.bert import BertConfig
from stoker.runtime.engine.request import GenerationRequest, SamplingParams
from stoker.runtime.engine.weights import Parameter
from tests.runtime.encoder.test_embedder import TINY as BERT
from tests.runtime.engine.agent_side import GREEDY, Agent, store_of
from tests.runtime.engine.conftest import TinyModel

PAGE = 1 << 16
ONE_AT_A_TIME = 4 * PAGE
"""Page 0 is nobody's; a model has one page of weights and needs one for its KV cache."""
TWO_AT_A_TIME = 8 * PAGE
NAMES = ("one", "two", "three")


@pytest.fixture(scope="module")
def models() -> dict[str, TinyModel]:
    return {name: TinyModel.random(seed) for seed, name in enumerate(NAMES)}


@pytest.fixture(scope="module")
def urls(models: dict[str, TinyModel], tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return {name: store_of(tmp_path_factory.mktemp(name), model) for name, model in models.items()}


@pytest.fixture
def agent() -> Iterator[Agent]:
    agent = Agent(ONE_AT_A_TIME)
    yield agent
    assert agent.close() == 0


def files(url: str) -> list[str]:
    return [str(path) for path in Path(url.removeprefix("file://")).glob("*.safetensors")]


def load(agent: Agent, name: str, url: str) -> None:
    agent.announce(name, url, files=files(url), num_blocks=0)
    for kind in ("allocated", "ready", "loaded"):
        assert agent.expect(kind)["model"] == name


def alone(model: TinyModel, prompt: list[int], **changes: Any) -> list[int]:
    request = GenerationRequest("r", prompt, SamplingParams(**{**GREEDY, **changes}))
    return model.engine().generate([request])["r"]


def test_models_take_turns_and_answer_as_if_alone(
    agent: Agent, urls: dict[str, str], models: dict[str, TinyModel]
) -> None:
    for name in NAMES:
        load(agent, name, urls[name])
    assert agent.stats()["there"] == ["three"]
    order = random.Random(1)
    for number in range(30):
        name, prompt = order.choice(NAMES), [order.randrange(97) for _ in range(order.randrange(1, 40))]
        agent.submit(name, f"r{number}", prompt)
        assert agent.answers(f"r{number}")[f"r{number}"] == (alone(models[name], prompt), "length", "")
        assert agent.stats()["there"] == [name]
    assert_nothing_is_lost(agent)


def test_requests_for_all_models_at_once_are_all_answered(
    agent: Agent, urls: dict[str, str], models: dict[str, TinyModel]
) -> None:
    for name in NAMES:
        load(agent, name, urls[name])
    order = random.Random(2)
    wanted = {}
    for number in range(24):
        name, prompt = NAMES[number % 3], [order.randrange(97) for _ in range(order.randrange(1, 40))]
        wanted[f"r{number}"] = (alone(models[name], prompt, max_tokens=40), "length", "")
        agent.submit(name, f"r{number}", prompt, {**GREEDY, "max_tokens": 40})
    assert agent.answers(*wanted) == wanted
    assert_nothing_is_lost(agent)


def test_what_is_kept_for_its_owner_stays_while_others_models_take_turns(urls: dict[str, str]) -> None:
    agent = Agent(TWO_AT_A_TIME)
    for name, owner in (("one", "ann"), ("two", "bob"), ("three", "bob")):
        frame = agent.load_frame(name, urls[name], files(urls[name]), num_blocks=0)
        agent.send({**frame, "owner": owner, "kept": owner == "ann"})
        agent.expect("loaded")
    for number in range(6):
        name = ("two", "three")[number % 2]
        agent.submit(name, f"r{number}", [1, 2, 3])
        agent.answers(f"r{number}")
        assert set(agent.stats()["there"]) == {"one", name}
    assert agent.close() == 0


def test_a_model_comes_back_from_host_memory(agent: Agent, urls: dict[str, str], models: dict[str, TinyModel]) -> None:
    """It came through the ring: what it is to come back from is made while it is on the device, for which the agent is
    asked once there isn't room for all."""
    agent.load("one", urls["one"], num_blocks=0)
    manifest = agent.announce("two", urls["two"], num_blocks=0)
    assert agent.expect("wants_image")["model"] == "one"
    agent.send({"t": "image", "model": "one", "name": "copy of one"})
    assert agent.expect("imaged") == {"t": "imaged", "model": "one", "error": ""}
    agent.expect("allocated")
    agent.feed("two", urls["two"], manifest, len(manifest.chunks))
    agent.send({"t": "chunks_done", "model": "two"})
    agent.expect("ready")
    agent.expect("loaded")
    assert agent.expect("wants_image")["model"] == "two"
    agent.send({"t": "image", "model": "two", "name": "copy of two"})
    agent.expect("imaged")
    for number, name in enumerate(("one", "two", "one")):
        agent.submit(name, f"r{number}", [1, 2, 3])
        assert agent.answers(f"r{number}")[f"r{number}"] == (alone(models[name], [1, 2, 3]), "length", "")
    assert set(agent.stats()["parked"]) == {"copy of one", "copy of two"}
    agent.send({"t": "park", "model": "one", "name": "copy of one"})
    assert agent.expect("parked")["error"] == ""


def encoder_store(folder: Path) -> str:
    """Of random numbers."""
    folder.mkdir()
    torch.manual_seed(0)
    parts = [part for parameter in bert.layout(BertConfig.from_hf(BERT), {}) for part in shaped(parameter)]
    save_file({name: torch.randn(shape) * 0.2 for name, shape in parts}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(BERT))
    publish(folder, open_store((folder.parent / "encoder-store").as_uri()))
    return (folder.parent / "encoder-store").as_uri()


def shaped(parameter: Parameter) -> list[tuple[str, tuple[int, ...]]]:
    return [(name, (rows, *parameter.shape[1:])) for name, rows in parameter.parts]


def test_an_encoder_comes_back_too(
    agent: Agent, urls: dict[str, str], models: dict[str, TinyModel], tmp_path: Path
) -> None:
    load(agent, "one", urls["one"])
    load(agent, "two", urls["two"])
    url, vectors = encoder_store(tmp_path / "encoder"), []
    agent.send(agent.load_frame("words", url, files(url), num_blocks=0, max_model_len=0))
    for kind in ("allocated", "ready", "loaded"):
        agent.expect(kind)
    for number in range(3):
        agent.send({"t": "submit", "model": "words", "id": f"e{number}", "texts": [[3, 4, 5]], "salt": b""})
        (item,) = agent.expect("deltas")["items"]
        vectors.append(item[7])
        assert agent.stats()["there"] == ["words"]
        agent.submit("one", f"r{number}", [1, 2])
        assert agent.answers(f"r{number}")[f"r{number}"] == (alone(models["one"], [1, 2]), "length", "")
    assert len(set(vectors)) == 1 and len(vectors[0]) == 4 * BERT["hidden_size"]


def test_a_request_for_a_model_that_is_away_can_be_aborted(agent: Agent, urls: dict[str, str]) -> None:
    load(agent, "one", urls["one"])
    agent.submit("one", "long", [1], {**GREEDY, "max_tokens": 90})
    load_frame = agent.load_frame("two", urls["two"], files(urls["two"]), num_blocks=0)
    agent.send(load_frame)
    agent.submit("one", "gone", [2], {**GREEDY, "max_tokens": 90})
    agent.send({"t": "abort", "model": "one", "id": "gone"})
    ends = agent.answers("long", "gone")
    assert (ends["long"][1], ends["gone"][1]) == ("length", "abort")


def test_a_model_that_never_fits_is_refused(agent: Agent, tmp_path: Path) -> None:
    wide = store_of(tmp_path, TinyModel.random(vocab_size=2000))
    agent.announce("wide", wide, files=files(wide), num_blocks=0)
    error = agent.expect("load_error")["error"]
    assert error["type"] == "out_of_memory" and "short of" in error["message"]


def assert_nothing_is_lost(agent: Agent) -> None:
    stats = agent.stats()
    for model in stats["models"].values():
        assert (model["running"], model["waiting"], model["used_blocks"]) == (0, 0, 0)
    time = stats["time"]
    assert abs(time["wall"] - time["busy"] - time["swap"] - time["load"] - time["idle"]) <= 4
    assert time["open"] == 0
    assert set(stats["ledger"]) == set(stats["there"])
