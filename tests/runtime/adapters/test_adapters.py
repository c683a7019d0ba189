"""Adapters in an engine: what comes out is what the base with merged weights says, whoever else is in the batch."""

import random
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from stoker.runtime.adapters import adapters as module
from stoker.runtime.adapters.adapter_file import AdapterFile
from stoker.runtime.engine.engine import Engine
from stoker.runtime.engine.grammars import Grammars
from stoker.runtime.engine.request import Delta, GenerationRequest, SamplingParams
from stoker.runtime.grammar import lark_grammar, regex_grammar
from tests.runtime.adapters.folders import ALL, file_of, merged, random_folder
from tests.runtime.engine.conftest import TinyModel
from tests.runtime.engine.test_grammars import TOKENIZER

KINDS: dict[str, dict[str, Any]] = {
    "all": {"modules": ALL},
    "attention": {"modules": ("q", "v"), "rank": 4},
    "mlp": {"modules": ("gate", "up", "down"), "rank": 16, "use_rslora": True},
    "one": {"modules": ("o",), "rank": 1, "lora_alpha": 3.5},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, tiny: TinyModel) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("adapters")
    return {
        name: random_folder(root / name, tiny.hf_config, seed, **fields)
        for seed, (name, fields) in enumerate(KINDS.items(), 1)
    }


@pytest.fixture(scope="module")
def files(folders: dict[str, Path]) -> dict[str, AdapterFile]:
    return {name: file_of(folder) for name, folder in folders.items()}


def prompt_of(seed: int, length: int = 40) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(6, 97) for _ in range(length)]


def request(name: str, file: AdapterFile | None, seed: int = 0, length: int = 40, **fields: Any) -> GenerationRequest:
    params = SamplingParams(12, temperature=0.0, ignore_eos=True)
    return GenerationRequest(name, prompt_of(seed, length), params, adapter=file, **fields)


def adapted(tiny: TinyModel, **options: Any) -> Engine:
    return tiny.engine(**{"adapter_slots": 4, **options})


def alone(model: TinyModel, asked: GenerationRequest) -> list[int]:
    plain = GenerationRequest(asked.id, asked.prompt, asked.params)
    return model.engine().generate([plain])[asked.id]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [1, 40])
def test_an_adapter_answers_as_the_merged_model_does(tiny: TinyModel, folders, files, kind: str, length: int) -> None:
    asked = request("a", files[kind], length=length)
    expected = alone(merged(tiny, folders[kind]), asked)
    assert adapted(tiny).generate([asked])["a"] == expected
    if kind == "all":
        assert expected != alone(tiny, asked), "the adapter matters"


@pytest.mark.parametrize("scheduling", ["on", "off"])
def test_a_batch_of_any_adapters_and_none_equals_lone_runs(tiny: TinyModel, folders, files, scheduling: str) -> None:
    models = {None: tiny, **{name: merged(tiny, folder) for name, folder in folders.items()}}
    names = [None, *KINDS, None, *KINDS]
    asked = [request(str(i), name and files[name], i, 3 + 7 * i) for i, name in enumerate(names)]
    engine = adapted(tiny, async_scheduling=scheduling, token_budget=24, max_seqs=8, max_model_len=90)
    found = engine.generate(asked)
    for one, name in zip(asked, names, strict=True):
        assert found[one.id] == alone(models[name], one), name
    assert engine.stats()["used_blocks"] == 0


def test_more_adapters_than_slots_take_turns(tiny: TinyModel, folders, files) -> None:
    """Every request gets its own adapter, whatever had its slot before; none is taken from a request in use."""
    engine = adapted(tiny, adapter_slots=2, max_seqs=6)
    names = random.Random(0).choices([None, *KINDS], k=40)
    asked = [request(str(i), name and files[name], i % 5, 20) for i, name in enumerate(names)]
    found = engine.generate(asked)
    expected: dict[Any, list[int]] = {}
    for i, name in enumerate(names):
        if (name, i % 5) not in expected:
            model = merged(tiny, folders[name]) if name else tiny
            expected[name, i % 5] = alone(model, asked[i])
        assert found[str(i)] == expected[name, i % 5]
    stats = engine.stats()
    assert stats["adapter_loads"] > len(KINDS), "some came a second time"
    assert stats["adapters"] == 2 and stats["adapters_waiting"] == 0


def test_the_one_used_longest_ago_gives_way(tiny: TinyModel, files) -> None:
    engine = adapted(tiny, adapter_slots=2)
    for name in ("all", "mlp", "all", "one"):
        engine.generate([request(name, files[name])])
    assert engine.adapters and set(engine.adapters.resident()) == {files["all"].revision, files["one"].revision}
    engine.generate([request("again", files["all"])])
    assert engine.stats()["adapter_loads"] == 3


def test_whoever_waits_for_a_slot_is_not_passed_for_ever(tiny: TinyModel, files) -> None:
    """The only slot's adapter is asked for again and again; the other one gets its turn after a few of those."""
    engine = adapted(tiny, adapter_slots=1, max_seqs=4)
    engine.submit(request("first", files["all"]))
    while not engine.step():
        pass
    engine.submit(request("rare", files["mlp"]))
    ended: list[str] = []
    count = 0
    while "rare" not in ended:
        if len(engine._sequences) < 4:
            engine.submit(request(f"busy {count}", files["all"]))
            count += 1
        ended += [delta.request_id for delta in engine.step() if delta.finish_reason]
        assert len(ended) < 25


def test_patient_requests_wait_behind_others_for_a_slot(tiny: TinyModel, files) -> None:
    engine = adapted(tiny, adapter_slots=1, max_seqs=1)
    engine.submit(request("first", files["all"]))
    while not engine.step():
        pass
    engine.submit(request("batch", files["mlp"], patient=True))
    engine.submit(request("chat", files["one"]))
    ended = [delta.request_id for deltas in run(engine).values() for delta in deltas if delta.finish_reason]
    assert ended == ["first", "chat", "batch"]


def test_others_go_on_while_an_adapter_is_read(tiny: TinyModel, folders, files, monkeypatch) -> None:
    gate, fill = threading.Event(), module.fill
    monkeypatch.setattr(module, "fill", lambda *args: (gate.wait(30), fill(*args)))
    engine = adapted(tiny)
    engine.submit(request("slow", files["all"]))
    engine.submit(request("base", None))
    done: dict[str, list[Delta]] = {"slow": [], "base": []}
    while not done["base"] or not done["base"][-1].finish_reason:
        for delta in engine.step():
            done[delta.request_id].append(delta)
    assert done["slow"] == []
    gate.set()
    while engine.has_work():
        for delta in engine.step():
            done[delta.request_id].append(delta)
    tokens = [token for delta in done["slow"] for token in delta.tokens]
    assert tokens == alone(merged(tiny, folders["all"]), request("slow", None))


def run(engine: Engine) -> dict[str, list[Delta]]:
    found: dict[str, list[Delta]] = {}
    while engine.has_work():
        for delta in engine.step():
            found.setdefault(delta.request_id, []).append(delta)
    return found


@pytest.mark.parametrize("options", [{}, {"num_blocks": 8, "host_cache_bytes": 1 << 20}])
def test_cached_prompts_are_never_shared_between_adapters(tiny: TinyModel, files, options: dict[str, int]) -> None:
    """Nor with the base, nor through a prompt's public part, on either tier; with the same adapter they are."""
    engine = adapted(tiny, **options)
    for round_ in range(2):
        for name in [None, *KINDS]:
            for public in (0, 32):
                asked = request(f"{name}", name and files[name], public_tokens=public)
                engine.submit(asked)
                (last,) = [delta for delta in run(engine)[f"{name}"] if delta.finish_reason]
                assert last.cached_tokens == (32 if round_ else 0), (name, public)


def test_another_version_of_an_adapter_finds_nothing_of_the_first(tiny: TinyModel, tmp_path: Path) -> None:
    engine = adapted(tiny)
    for seed in (1, 2):
        folder = random_folder(tmp_path / "same", tiny.hf_config, seed)
        engine.submit(request(str(seed), file_of(folder)))
        deltas = run(engine)[str(seed)]
        assert deltas[-1].cached_tokens == 0
        tokens = [token for delta in deltas for token in delta.tokens]
        assert tokens == alone(merged(tiny, folder), request("x", None))


def test_one_whose_adapter_cant_be_loaded_fails_alone(tiny: TinyModel, folders, files, tmp_path: Path) -> None:
    """And its slot serves the next."""
    shutil.copytree(folders["all"], tmp_path / "bad")
    bad = file_of(tmp_path / "bad")
    data = bytearray(Path(bad.path).read_bytes())
    data[-1] ^= 1
    Path(bad.path).write_bytes(data)
    bad = AdapterFile("another revision", bad.path, bad.digest, bad.config)
    gone = AdapterFile("a third", str(tmp_path / "nothing"), bad.digest, bad.config)
    engine = adapted(tiny, adapter_slots=1)
    asked = {"bad": bad, "gone": gone, "good": files["all"], "base": None}
    for name, file in asked.items():
        engine.submit(request(name, file))
    found = run(engine)
    assert found["bad"][-1].finish_reason == "error" and "SHA-256" in found["bad"][-1].error
    assert found["gone"][-1].finish_reason == "error" and "can't be read" in found["gone"][-1].error
    for name in ("good", "base"):
        assert found[name][-1].finish_reason == "length"
    assert engine.stats()["used_blocks"] == 0 and not engine._sequences


def test_a_higher_rank_than_there_is_room_for_is_refused(tiny: TinyModel, files) -> None:
    engine = adapted(tiny, adapter_rank=8)
    engine.submit(request("high", files["mlp"]))
    (last,) = run(engine)["high"]
    assert last.finish_reason == "error" and "rank 16 is above the function's adapter_rank 8" in last.error


def test_a_model_without_slots_refuses_adapters(tiny: TinyModel, files) -> None:
    engine = tiny.engine()
    with pytest.raises(ValueError, match="without room for adapters"):
        engine.submit(request("a", files["all"]))
    assert not engine.has_work()
    assert engine.generate([request("b", None)]) == adapted(tiny).generate([request("b", None)])


@pytest.mark.parametrize("when", ["waiting", "running"])
def test_aborts_free_the_slot(tiny: TinyModel, files, when: str) -> None:
    engine = adapted(tiny, adapter_slots=1)
    engine.submit(request("a", files["all"]))
    deltas: list[Delta] = []
    while when == "running" and not deltas:
        deltas = engine.step()
    engine.abort("a")
    deltas = run(engine)["a"]
    assert deltas[-1].finish_reason == "abort"
    assert run_one(engine, request("b", files["mlp"]))[-1].finish_reason == "length"


def run_one(engine: Engine, asked: GenerationRequest) -> list[Delta]:
    engine.submit(asked)
    return run(engine)[asked.id]


def test_all_can_be_ended_at_once(tiny: TinyModel, files) -> None:
    engine = adapted(tiny, adapter_slots=1)
    for name in KINDS:
        engine.submit(request(name, files[name]))
    assert {delta.request_id for delta in engine.fail_all("over")} == set(KINDS)
    assert not engine.has_work()
    assert run_one(engine, request("again", files["mlp"]))[-1].finish_reason == "length"


def test_preempted_requests_keep_their_adapter(tiny: TinyModel, folders, files) -> None:
    engine = adapted(tiny, num_blocks=8, max_seqs=4)
    asked = [request(name, files[name], i, 30) for i, name in enumerate(KINDS)]
    found = engine.generate(asked)
    assert engine.stats()["preemptions"] > 0
    for one in asked:
        assert found[one.id] == alone(merged(tiny, folders[one.id]), one)


def test_adapters_come_back_with_their_model(tiny: TinyModel, folders, files) -> None:
    """A model leaves the device in the midst of its answers; others write over its memory, slots included."""
    engine = adapted(tiny, prefix_cache=False)
    asked = [request(name, files[name], i) for i, name in enumerate(KINDS)]
    got: dict[str, list[int]] = {one.id: [] for one in asked}
    for one in asked:
        engine.submit(one)
    while not all(got.values()):
        for delta in engine.step():
            got[delta.request_id] += delta.tokens
    for delta in engine.suspend():
        got[delta.request_id] += delta.tokens
    assert engine.adapters is not None
    slots = engine.adapters._memory.view(-1).view(torch.uint8)
    slots.fill_(255)
    engine.runner.kv.zero_()
    engine.resume(engine.runner.weights)
    engine.adapters.rebind(slots.clone())
    for delta in (delta for deltas in run(engine).values() for delta in deltas):
        got[delta.request_id] += delta.tokens
    for one in asked:
        assert got[one.id] == alone(merged(tiny, folders[one.id]), one)


def test_grammars_and_adapters_go_together(tiny: TinyModel, folders, files) -> None:
    """Whichever is ready first; an answer by a bad grammar leaves the slot to others."""
    grammar = regex_grammar("[a-z]{4}[0-9]{4}")

    def answers(model: TinyModel, file: AdapterFile | None) -> list[Delta]:
        engine = model.engine(adapter_slots=1)
        engine.grammars = Grammars(TOKENIZER.to_str(), 97, (5,))
        for name, wanted in (("bad", lark_grammar("start: nothing")), ("good", grammar)):
            params = SamplingParams(12, temperature=0.0, grammar=wanted)
            engine.submit(GenerationRequest(name, prompt_of(3), params, adapter=file))
        found = run(engine)
        assert found["bad"][-1].finish_reason == "refused"
        assert run_one(engine, request("next", None if file is None else files["mlp"]))[-1].finish_reason == "length"
        return found["good"]

    ours = [token for delta in answers(tiny, files["all"]) for token in delta.tokens]
    merged_ones = [token for delta in answers(merged(tiny, folders["all"]), None) for token in delta.tokens]
    assert ours == merged_ones and len(ours) == 8
