"""The engine process as the host agent sees it: a real process, a real socket pair, a real ring."""

import queue
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from stoker.coldstart.fetch import Fetcher
from stoker.coldstart.manifest import read_manifest
from stoker.coldstart.store import open_store
from stoker.runtime.engine.request import GenerationRequest, SamplingParams
from tests.runtime.engine.agent_side import GREEDY, PATIENCE, Agent, store_of

if TYPE_CHECKING:
    from conftest import TinyModel


@pytest.fixture(scope="module")
def models(tiny: "TinyModel") -> dict[str, "TinyModel"]:
    return {"one": tiny, "two": type(tiny).random(seed=9, tie_word_embeddings=True, num_hidden_layers=3)}


@pytest.fixture(scope="module")
def urls(models: dict[str, "TinyModel"], tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return {name: store_of(tmp_path_factory.mktemp(name), model) for name, model in models.items()}


@pytest.fixture(scope="module")
def large(tiny: "TinyModel", tmp_path_factory: pytest.TempPathFactory) -> str:
    """About 130 MB in 8 chunks."""
    wide = type(tiny).random(vocab_size=60_000, hidden_size=256, num_hidden_layers=1)
    return store_of(tmp_path_factory.mktemp("large"), wide)


@pytest.fixture(scope="module")
def shared() -> Iterator[Agent]:
    agent = Agent()
    yield agent
    assert agent.close() == 0


@pytest.fixture
def agent(shared: Agent, urls: dict[str, str]) -> Iterator[Agent]:
    """Model `one` is loaded; nothing is left over when the test ends."""
    if "one" not in shared.stats()["models"]:
        shared.load("one", urls["one"])
    yield shared
    stats = shared.stats()
    assert stats["loading"] == []
    for model in stats["models"].values():
        assert (model["running"], model["waiting"], model["used_blocks"]) == (0, 0, 0)
    for model in set(stats["models"]) - {"one"}:
        shared.send({"t": "unload", "model": model})
        shared.expect("unloaded")
    assert all(left.empty() for left in shared.frames.values())


def lone(model: "TinyModel", prompt: list[int], **changes: Any) -> list[int]:
    request = GenerationRequest("r", prompt, SamplingParams(**{**GREEDY, **changes}))
    return model.engine().generate([request])["r"]


def test_hello_tells_where_the_start_went(shared: Agent) -> None:
    assert shared.hello["pid"] == shared.process.pid
    assert [phase["name"] for phase in shared.hello["phases"]] == ["import torch", "import engine"]


def test_ready_comes_with_phases_and_facts(agent: Agent, urls: dict[str, str]) -> None:
    ready = agent.load("again", urls["one"], max_seqs=8, dtype="auto")
    names = [phase["name"] for phase in ready["phases"]]
    assert sorted(names) == ["allocate KV cache", "allocate weights", "upload weights", "warm up"]
    assert (ready["facts"]["kv_blocks"], ready["facts"]["max_seqs"], ready["facts"]["dtype"]) == (32, 8, "float32")


def test_a_request_is_answered_when_the_last_chunk_has_come(
    agent: Agent, urls: dict[str, str], models: dict[str, "TinyModel"]
) -> None:
    """It is let in before, and its first step waits for each layer."""
    manifest = agent.announce("two", urls["two"])
    agent.expect("allocated")
    agent.feed("two", urls["two"], manifest, len(manifest.chunks) - 1)
    assert agent.expect("ready")["model"] == "two"
    agent.submit("two", "early", [1, 2, 3])
    agent.submit("two", "given up", [1, 2])
    assert agent.frames["deltas"].empty() and agent.frames["loaded"].empty()
    fetcher = Fetcher(open_store(urls["two"]), manifest, agent.ring, connections=1)
    fetcher.start()
    while (ready := fetcher.next(PATIENCE)) and ready.chunk < len(manifest.chunks) - 1:
        fetcher.release(ready.slot)
    assert ready
    agent.send({"t": "chunk", "model": "two", "chunk": ready.chunk, "slot": ready.slot})
    assert agent.expect("slot_free")["slot"] == ready.slot
    fetcher.cancel()
    agent.send({"t": "chunks_done", "model": "two"})
    agent.expect("loaded")
    assert agent.answers("early", "given up")["early"] == (lone(models["two"], [1, 2, 3]), "length", "")


def test_no_token_of_a_load_that_fails_gets_out(agent: Agent, urls: dict[str, str]) -> None:
    manifest = agent.announce("two", urls["two"])
    agent.expect("allocated")
    agent.feed("two", urls["two"], manifest, len(manifest.chunks) - 1)
    agent.expect("ready")
    agent.submit("two", "early", [1, 2, 3])
    agent.send({"t": "chunks_done", "model": "two"})
    assert agent.expect("load_error")["error"]["code"] == "ObjectTruncated"
    assert agent.frames["deltas"].empty() and agent.frames["loaded"].empty()


def file_paths(url: str) -> list[str]:
    manifest = read_manifest(open_store(url))
    return [str(Path(url.removeprefix("file://")) / entry.name) for entry in manifest.files]


def test_files_on_this_machine_are_mapped(agent: Agent, urls: dict[str, str], models: dict[str, "TinyModel"]) -> None:
    agent.announce("two", urls["two"], files=file_paths(urls["two"]))
    assert agent.expect("ready")["facts"]["parameters"] == sum(t.numel() for t in models["two"].state.values())
    names = [phase["name"] for phase in agent.expect("loaded")["phases"]]
    assert {"upload weights", "checksum", "register files"} <= set(names)
    agent.expect("allocated")
    agent.submit("two", "r", [1, 2, 3])
    assert agent.answers("r")["r"][0] == lone(models["two"], [1, 2, 3])


def test_the_bytes_on_the_device_can_be_checked(agent: Agent, urls: dict[str, str]) -> None:
    body = agent.load_frame("two", urls["two"], files=file_paths(urls["two"]))
    agent.send({**body, "check": True})
    for kind in ("allocated", "ready", "loaded"):
        frame = agent.expect(kind)
    assert "checksum on device" in {phase["name"] for phase in frame["phases"]}


def test_a_flipped_byte_in_a_mapped_file_is_an_error_and_no_answer(
    agent: Agent, tiny: "TinyModel", tmp_path: Path
) -> None:
    url = store_of(tmp_path, tiny)
    (path,) = file_paths(url)
    data = bytearray(Path(path).read_bytes())
    data[-1] ^= 1
    Path(path).write_bytes(data)
    agent.announce("two", url, files=[path])
    error = agent.expect("load_error")["error"]
    assert (error["type"], error["code"]) == ("cold_start_error", "ObjectAltered") and path in error["message"]
    agent.expect("allocated")
    agent.frames["ready"] = queue.Queue()
    assert agent.frames["loaded"].empty()


def test_a_parked_model_comes_back_with_the_same_tokens(
    agent: Agent, urls: dict[str, str], models: dict[str, "TinyModel"]
) -> None:
    agent.load("two", urls["two"])
    for round in ("first", "second"):
        agent.send({"t": "park", "model": "two", "name": "image"})
        assert agent.expect("parked") == {"t": "parked", "model": "two", "error": ""}
        stats = agent.stats()
        assert list(stats["models"]) == ["one"] and set(stats["ledger"]) == {"one"}
        assert list(stats["parked"]) == ["image"]
        agent.send({"t": "unpark", "model": "two", "name": "image"})
        for kind in ("allocated", "ready", "loaded"):
            frame = agent.expect(kind)
        assert {"allocate weights", "upload weights", "allocate KV cache"} <= {p["name"] for p in frame["phases"]}
        agent.submit("two", round, [1, 2, 3])
        assert agent.answers(round)[round] == (lone(models["two"], [1, 2, 3]), "length", "")
    agent.send({"t": "unload", "model": "two"})
    agent.expect("unloaded")
    agent.send({"t": "forget", "name": "image"})
    assert agent.stats()["parked"] == {}
    agent.send({"t": "unpark", "model": "two", "name": "image"})
    assert "nothing is parked as 'image'" in agent.expect("load_error")["error"]["message"]


def test_requests_run_together_and_equal_lone_runs(agent: Agent, models: dict[str, "TinyModel"]) -> None:
    prompts = {f"r{i}": list(range(i, i + 10 + i)) for i in range(8)}
    for name, prompt in prompts.items():
        agent.submit("one", name, prompt)
    answers = agent.answers(*prompts)
    assert answers == {name: (lone(models["one"], p), "length", "") for name, p in prompts.items()}


def test_a_request_resumes_after_its_prior_tokens(agent: Agent, models: dict[str, "TinyModel"]) -> None:
    sampled = {**GREEDY, "temperature": 1.0, "seed": 5}
    whole = lone(models["one"], [1, 2, 3], temperature=1.0, seed=5)
    agent.submit("one", "r", [1, 2, 3], sampled, prior=whole[:7], salt=b"tenant")
    assert agent.answers("r")["r"] == (whole[7:], "length", "")


def test_two_models_answer_at_the_same_time(agent: Agent, urls: dict[str, str], models: dict[str, "TinyModel"]) -> None:
    agent.load("two", urls["two"])
    for i in range(4):
        for model in ("one", "two"):
            agent.submit(model, f"{model}-{i}", [i, 2, 3])
    answers = agent.answers(*(f"{model}-{i}" for model in ("one", "two") for i in range(4)))
    for name, (tokens, reason, _) in answers.items():
        model, i = name.split("-")
        assert (tokens, reason) == (lone(models[model], [int(i), 2, 3]), "length")


def test_a_model_answers_while_another_one_loads(agent: Agent, large: str, models: dict[str, "TinyModel"]) -> None:
    agent.submit("one", "r", [1, 2], {**GREEDY, "max_tokens": 90})
    agent.load("large", large)
    assert agent.answers("r")["r"][0] == lone(models["one"], [1, 2], max_tokens=90)


def test_abort_frees_and_is_confirmed(agent: Agent) -> None:
    for name in ("gone", "kept"):
        agent.submit("one", name, [1, 2, 3], {**GREEDY, "max_tokens": 90})
    agent.send({"t": "abort", "model": "one", "id": "gone"})
    agent.send({"t": "abort", "model": "one", "id": "never was"})
    agent.send({"t": "abort", "model": "nor this", "id": "gone"})
    answers = agent.answers("gone", "kept")
    assert answers["gone"][1:] == ("abort", "")
    assert (len(answers["kept"][0]), answers["kept"][1]) == (90, "length")


def test_unload_frees_and_later_requests_are_told(agent: Agent, urls: dict[str, str]) -> None:
    agent.load("two", urls["two"])
    agent.submit("two", "lost", [1], {**GREEDY, "max_tokens": 90})
    agent.send({"t": "unload", "model": "two"})
    agent.submit("two", "late", [1])
    assert agent.expect("unloaded")["model"] == "two"
    ends: dict[str, str] = {}
    while "late" not in ends:
        ends.update({item[0]: item[3] for item in agent.expect("deltas")["items"]})
    assert ends["late"] == "model 'two' is not loaded"
    assert list(agent.stats()["models"]) == ["one"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt": []}, "the prompt is empty"),
        ({"prompt": [97]}, "token id 97"),
        ({"prompt": None}, "NoneType"),
        ({"prompt": [1] * 80}, "over the maximum context length of 96"),
        ({"prompt": [1], "params": {}}, "max_tokens is missing"),
        ({"prompt": [1], "params": {"max_tokens": 1, "colour": "red"}}, "unknown sampling parameter"),
        ({"prompt": [1], "params": {"max_tokens": 1, "temperature": None}}, "temperature must be a number"),
    ],
)
def test_an_impossible_request_is_answered_and_hurts_nobody(
    agent: Agent, models: dict[str, "TinyModel"], fields: dict[str, Any], message: str
) -> None:
    agent.submit("one", "good", [1, 2, 3])
    agent.submit("one", "bad", **fields)
    answers = agent.answers("good", "bad")
    assert answers["good"] == (lone(models["one"], [1, 2, 3]), "length", "")
    assert answers["bad"][:2] == ([], "error")
    assert message in answers["bad"][2]


def test_frames_that_make_no_sense_are_survived(agent: Agent) -> None:
    agent.send({"t": "dance"})
    agent.send({"t": "submit", "model": "one"})
    agent.send({"t": "chunks_done", "model": "unknown"})
    agent.send({"t": "load_failed", "model": "unknown"})
    agent.submit("one", "r", [1])
    assert agent.answers("r")["r"][1] == "length"


def test_a_chunk_for_a_model_that_is_gone_gives_its_slot_back(agent: Agent) -> None:
    agent.send({"t": "chunk", "model": "unknown", "chunk": 0, "slot": 2})
    assert agent.expect("slot_free")["slot"] == 2


def test_a_model_that_cannot_be_loaded_says_why(
    agent: Agent, urls: dict[str, str], models: dict[str, "TinyModel"]
) -> None:
    agent.announce("small", urls["one"], num_blocks=2)
    manifest = read_manifest(open_store(urls["one"]))
    agent.feed("small", urls["one"], manifest, len(manifest.chunks))
    agent.send({"t": "chunks_done", "model": "small"})
    error = agent.expect("load_error")
    assert (error["model"], error["error"]["type"]) == ("small", "out_of_memory")
    assert "max_model_len to 32 or less" in error["error"]["message"]

    agent.announce("holes", urls["one"])
    agent.expect("allocated")
    agent.send({"t": "chunks_done", "model": "holes"})
    error = agent.expect("load_error")["error"]
    assert (error["type"], error["code"]) == ("cold_start_error", "ObjectTruncated")

    bad = replace(manifest, revision="0" * 64).pack()
    agent.send({"t": "load", "model": "bad", "manifest": bad, "documents": {}, "options": {}})
    assert agent.expect("load_error")["error"]["code"] == "ManifestInvalid"
    agent.announce("odd", urls["one"], colour="red")
    assert agent.expect("load_error")["error"]["type"] == "model_error"
    agent.submit("one", "r", [1, 2, 3])
    assert agent.answers("r")["r"][0] == lone(models["one"], [1, 2, 3])


@pytest.mark.parametrize("end", ["load_failed", "unload"])
def test_a_load_that_ends_half_way_gives_its_memory_back(agent: Agent, large: str, end: str) -> None:
    before = agent.stats()["resident_bytes"]
    manifest = agent.announce("large", large)
    agent.expect("allocated")
    agent.feed("large", large, manifest, 4)
    during = agent.stats()
    assert during["loading"] == ["large"]
    assert during["resident_bytes"] - before > 50 << 20
    agent.send({"t": end, "model": "large"})
    agent.frames.pop("ready", None)
    assert agent.stats()["resident_bytes"] - before < 10 << 20
    if end == "unload":
        agent.expect("unloaded")


def test_unloading_gives_the_memory_back_and_loading_again_works(agent: Agent, large: str) -> None:
    before = agent.stats()["resident_bytes"]
    for _ in range(2):
        agent.load("large", large)
        agent.submit("large", "r", [59_999])
        assert agent.answers("r")["r"][1] == "length"
        agent.send({"t": "unload", "model": "large"})
        agent.expect("unloaded")
    assert agent.stats()["resident_bytes"] - before < 20 << 20


@pytest.fixture
def busy(urls: dict[str, str]) -> Iterator[Agent]:
    """A process of its own, streaming."""
    agent = Agent()
    agent.load("one", urls["one"], max_model_len=128)
    agent.submit("one", "r", [1], {**GREEDY, "max_tokens": 127})
    agent.expect("deltas")
    yield agent
    if agent.process.poll() is None:
        agent.process.kill()
    agent.bury()


def test_a_killed_process_closes_the_channel(busy: Agent) -> None:
    busy.process.kill()
    busy.expect("closed")
    assert busy.process.wait(PATIENCE) == -signal.SIGKILL


def test_it_ends_when_the_agent_is_gone(busy: Agent) -> None:
    busy.process.send_signal(signal.SIGINT)
    busy.stats()
    assert busy.process.poll() is None, "Ctrl-C is the agent's business"
    busy.channel.close()
    assert busy.process.wait(PATIENCE) == 0
