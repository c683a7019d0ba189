"""Blocks of one engine's prompt cache in another engine of the same model, and in others."""

import threading
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

from stoker.runtime.engine.engine import Engine
from stoker.runtime.engine.request import GenerationRequest, SamplingParams
from stoker.runtime.pool.prompt_exchange import PromptExchange, device_room
from stoker.runtime.pool.prompt_file import read_head, seal
from stoker.runtime.wire import Frame
from tests.runtime.engine.conftest import TinyModel

BLOCK_BYTES = 4096
KEY = b"k" * 32
MADE_FOR = {"function": "chat"}
TIERS = [{}, {"host_cache_bytes": 40 * BLOCK_BYTES}]


@pytest.fixture(scope="module")
def tiny() -> TinyModel:
    return TinyModel.random()


class Process:
    """One engine process with one model, as far as prompts are concerned."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.answers: SimpleQueue[Frame] = SimpleQueue()
        self._reminders: SimpleQueue[Frame] = SimpleQueue()
        self.exchange = PromptExchange(self.answers.put, self._reminders.put)

    def ask(self, kind: str, path: Path, **fields: Any) -> tuple[int, str]:
        """How many blocks were moved, or why not."""
        self.exchange.handle("m", self.engine, {"t": kind, "model": "m", "path": str(path), **fields})
        if self.answers.empty():
            self.exchange.handle("m", self.engine, self._reminders.get(timeout=30))
        answer = self.answers.get_nowait()
        assert (answer["t"], answer["model"], answer["path"]) == ("prompts", "m", str(path))
        assert self.engine.stats()["used_blocks"] == 0
        return answer["blocks"], answer["error"]

    def export(self, path: Path, most: int = 1 << 20, bytes_s: float = 0.0, within_s: float = 30.0) -> tuple[int, str]:
        fields = {"bytes": most, "bytes_s": bytes_s, "within_s": within_s, "made_for": MADE_FOR}
        moved = self.ask("export prompts", path, **fields)
        if moved[0]:
            seal(path, KEY)
        return moved

    def restore(self, path: Path) -> tuple[int, str]:
        return self.ask("import prompts", path)

    def say(self, one: GenerationRequest) -> tuple[list[int], int]:
        """Its tokens, and how many of its prompt's came from a cache."""
        self.engine.submit(one)
        deltas = []
        while self.engine.has_work():
            deltas += self.engine.step()
        return [token for delta in deltas for token in delta.tokens], deltas[-1].cached_tokens


def request(name: str, last: int = 1, first: int = 3, salt: bytes = b"ann", public: int = 0) -> GenerationRequest:
    """A system prompt of three blocks and a bit, and a question of a block and a bit behind it."""
    prompt = [(first + 7 * i) % 97 for i in range(50)] + [(last + 5 * i) % 97 for i in range(20)]
    params = SamplingParams(6, temperature=0.7, seed=last, ignore_eos=True)
    return GenerationRequest(name, prompt, params, cache_salt=salt, public_tokens=public)


def asleep(tiny: TinyModel, path: Path, **options: Any) -> Process:
    """Two questions to one system prompt were answered."""
    process = Process(tiny.engine(**options))
    for last in (1, 2):
        process.say(request(str(last), last))
    assert process.export(path) == (3, "")
    return process


@pytest.mark.parametrize("scheduling", ["on", "off"])
@pytest.mark.parametrize("before", TIERS, ids=["device", "host"])
@pytest.mark.parametrize("after", TIERS, ids=["to device", "to host"])
def test_the_first_answer_after_waking_is_the_same_and_its_system_prompt_cached(
    tiny: TinyModel, tmp_path: Path, before: dict[str, Any], after: dict[str, Any], scheduling: Any
) -> None:
    asleep(tiny, tmp_path / "file", **before)
    woken, cold = (Process(tiny.engine(async_scheduling=scheduling, **options)) for options in (after, {}))
    assert woken.restore(tmp_path / "file") == (3, "")
    for last in (7, 8, 1):
        asked = request(f"r{last}", last)
        alone = Process(tiny.engine(prefix_cache=False)).say(asked)
        assert woken.say(asked) == (alone[0], 48) and cold.say(asked)[0] == alone[0]


def test_only_what_was_of_use_to_a_later_request_is_kept(tiny: TinyModel, tmp_path: Path) -> None:
    process = Process(tiny.engine())
    process.say(request("a", 1))
    assert process.export(tmp_path / "file") == (0, "") and not (tmp_path / "file").exists()
    process.say(request("b", 2))
    process.say(request("c", 2, first=40))
    assert process.export(tmp_path / "file") == (3, "")
    assert [(row.parent, row.uses) for row in read_head(tmp_path / "file").rows] == [(-1, 1), (0, 1), (1, 1)]


def test_a_public_prefix_is_kept_at_once_and_serves_others_after_waking(tiny: TinyModel, tmp_path: Path) -> None:
    process = Process(tiny.engine())
    process.say(request("a", 1, public=40))
    assert process.export(tmp_path / "file") == (2, "")
    woken = Process(tiny.engine())
    assert woken.restore(tmp_path / "file") == (2, "")
    assert woken.say(request("b", 2, salt=b"bob", public=40))[1] == 32


def test_no_other_tenant_finds_it_after_waking(tiny: TinyModel, tmp_path: Path) -> None:
    asleep(tiny, tmp_path / "file")
    woken = Process(tiny.engine())
    woken.restore(tmp_path / "file")
    assert woken.say(request("b", 7, salt=b"bob"))[1] == 0
    assert woken.say(request("a", 7))[1] == 48


def test_what_the_device_evicted_is_kept_from_the_host(tiny: TinyModel, tmp_path: Path) -> None:
    process = Process(tiny.engine(num_blocks=7, max_seqs=1, host_cache_bytes=80 * BLOCK_BYTES))
    for last in (1, 2):
        process.say(request(str(last), last))
    for first in range(40, 46):
        process.say(request(f"other{first}", 1, first=first))
    assert not process.engine.pool.entries.keys() & process.engine.scheduler.uses.counts.keys()
    assert process.export(tmp_path / "file") == (3, "")
    woken = Process(tiny.engine())
    assert woken.restore(tmp_path / "file") == (3, "")
    assert woken.say(request("7", 7)) == (Process(tiny.engine()).say(request("7", 7))[0], 48)


def test_the_limit_in_bytes_leaves_the_chains_heads(tiny: TinyModel, tmp_path: Path) -> None:
    process = asleep(tiny, tmp_path / "file")
    assert process.export(tmp_path / "file", most=2 * BLOCK_BYTES + 1) == (2, "")
    assert (tmp_path / "file").stat().st_size < 3 * BLOCK_BYTES
    woken = Process(tiny.engine())
    woken.restore(tmp_path / "file")
    assert woken.say(request("7", 7))[1] == 32


def test_nothing_is_kept_where_computing_is_quicker(tiny: TinyModel, tmp_path: Path) -> None:
    process = asleep(tiny, tmp_path / "file")
    assert process.engine.pace.token_s > 0
    quickest = 3 * BLOCK_BYTES / (48 * process.engine.pace.token_s)
    assert process.export(tmp_path / "file", bytes_s=quickest * 0.9) == (0, "")
    assert process.export(tmp_path / "file", bytes_s=quickest * 1.1) == (3, "")


def test_what_is_in_the_store_already_is_not_written_again(tiny: TinyModel, tmp_path: Path) -> None:
    process = asleep(tiny, tmp_path / "first")
    for last in (3, 4, 5):
        process.say(request(str(last), last))
    assert process.export(tmp_path / "file") == (3, "")
    woken = Process(tiny.engine())
    woken.restore(tmp_path / "file")
    assert woken.export(tmp_path / "again") == (0, "")
    woken.say(request("7", 7))
    assert woken.export(tmp_path / "again") == (0, "")
    for last in (7, 8):
        woken.say(request(f"new{last}", last, first=60))
    assert woken.export(tmp_path / "again") == (6, "")


@pytest.mark.parametrize("options", TIERS, ids=["device", "host"])
def test_as_much_comes_back_as_there_is_room_for(tiny: TinyModel, tmp_path: Path, options: dict[str, Any]) -> None:
    """On the device, the longest request still finds room meanwhile: 6 of these 8 blocks and a spare one."""
    asleep(tiny, tmp_path / "file")
    small = {"host_cache_bytes": BLOCK_BYTES} if options else {"num_blocks": 8}
    woken = Process(tiny.engine(**small))
    assert woken.restore(tmp_path / "file") == (1, "")
    assert woken.say(request("7", 7)) == (Process(tiny.engine()).say(request("7", 7))[0], 16)
    assert woken.engine.stats()["free_blocks"] + woken.engine.stats()["cached_blocks"] == woken.engine.pool.total


@pytest.mark.parametrize("options", TIERS, ids=["device", "host"])
def test_a_request_that_comes_before_the_blocks_computes(
    tiny: TinyModel, tmp_path: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    asleep(tiny, tmp_path / "file")
    woken, may_read = Process(tiny.engine(**options)), threading.Event()
    monkeypatch.setattr("stoker.runtime.pool.prompt_exchange.fill", lambda *_: may_read.wait(30))
    frame = {"t": "import prompts", "model": "m", "path": str(tmp_path / "file")}
    woken.exchange.handle("m", woken.engine, frame)
    early = request("early", 7)
    assert woken.say(early) == (Process(tiny.engine()).say(early)[0], 0)
    may_read.set()
    woken.exchange.wait_for("m")
    assert woken.answers.get_nowait()["blocks"] == 3
    # The monkeypatched reader has filled nothing: what was computed must have stayed.
    late = request("late", 8)
    assert woken.say(late) == (Process(tiny.engine()).say(late)[0], 48)
    stats = woken.engine.stats()
    assert stats["used_blocks"] == 0 and stats["free_blocks"] + stats["cached_blocks"] == woken.engine.pool.total


def test_a_file_that_ends_early_changes_nothing(tiny: TinyModel, tmp_path: Path) -> None:
    asleep(tiny, tmp_path / "file")
    woken = Process(tiny.engine())
    whole = (tmp_path / "file").read_bytes()
    (tmp_path / "file").write_bytes(whole[:-100])
    assert woken.restore(tmp_path / "file")[0] == 0 and woken.engine.stats()["cached_blocks"] == 0
    assert woken.restore(tmp_path / "nothing")[0] == 0
    assert woken.say(request("7", 7))[1] == 0


OTHERS: dict[str, dict[str, Any]] = {
    "shape": {"changes": {"num_key_value_heads": 4, "num_attention_heads": 4}},
    "dtype": {"options": {"dtype": "bfloat16"}},
    "layers": {"changes": {"num_hidden_layers": 3}},
    "revision": {"revision": "another"},
}


@pytest.mark.parametrize("other", OTHERS)
def test_another_models_blocks_are_not_taken(tiny: TinyModel, tmp_path: Path, other: str) -> None:
    asleep(tiny, tmp_path / "file")
    given = OTHERS[other]
    engine = TinyModel.random(**given.get("changes", {})).engine(**given.get("options", {}))
    engine.revision = given.get("revision", engine.revision)
    woken = Process(engine)
    blocks, error = woken.restore(tmp_path / "file")
    assert blocks == 0 and error.startswith("its ") and woken.engine.stats()["cached_blocks"] == 0


def test_what_takes_too_long_is_given_up_and_the_cache_stays_whole(tiny: TinyModel, tmp_path: Path) -> None:
    process = Process(tiny.engine())
    for last in (1, 2):
        process.say(request(str(last), last))
    blocks, error = process.export(tmp_path / "file", within_s=-1.0)
    assert blocks == 0 and "took too long" in error
    assert process.say(request("3", 3))[1] == 48


def test_a_slot_that_was_used_for_something_else_meanwhile_spoils_the_file(
    tiny: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = Process(tiny.engine(num_blocks=7, max_seqs=1, host_cache_bytes=8 * BLOCK_BYTES))
    for last in (1, 2):
        process.say(request(str(last), last))
    process.engine.pool.remove(range(1, 8))
    process.engine.pool.add(range(1, 8))
    fields = {"bytes": 1 << 20, "bytes_s": 0.0, "within_s": 30.0, "made_for": MADE_FOR}
    frame = {"t": "export prompts", "model": "m", "path": str(tmp_path / "file"), **fields}
    process.exchange.handle("m", process.engine, frame)
    for first in range(40, 46):
        process.say(request(f"other{first}", 1, first=first))
    process.exchange.wait_for("m")
    assert process.answers.get_nowait()["blocks"] == 0


def test_a_model_that_is_dropped_waits_for_its_move(tiny: TinyModel, tmp_path: Path) -> None:
    asleep(tiny, tmp_path / "file")
    woken = Process(tiny.engine())
    woken.exchange.handle("m", woken.engine, {"t": "import prompts", "model": "m", "path": str(tmp_path / "file")})
    woken.exchange.drop("m")
    assert woken.answers.get_nowait()["blocks"] == 3 and woken.engine.stats()["used_blocks"] == 0


def test_a_model_that_is_not_loaded_is_answered_too(tmp_path: Path) -> None:
    answers: list[Frame] = []
    exchange = PromptExchange(answers.append, answers.append)
    exchange.handle("m", None, {"t": "import prompts", "model": "m", "path": str(tmp_path / "file")})
    assert (answers[0]["blocks"], answers[0]["error"]) == (0, "the model isn't loaded, or has no prompt cache")


def test_blocks_of_a_shared_device_are_asked_for(tiny: TinyModel) -> None:
    """As many as are imported, and the longest request's and a spare one. Away from the device there are none."""
    engine = tiny.engine(num_blocks=40)
    engine.pool.remove(range(1, 41))
    asked: list[int] = []

    def more(wanted: int) -> range:
        asked.append(wanted)
        return range(1, 1 + wanted)

    assert device_room(engine, 3, None) == []
    assert len(device_room(engine, 3, more)) == 3 and asked == [3 + 6 + 1]
