"""SmolLM2-135M-Instruct against transformers: greedy tokens in float32, however the requests are run."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from stoker.coldstart.manifest import read_manifest
from stoker.coldstart.store import open_store
from stoker.runtime.engine.engine import Engine
from stoker.runtime.engine.loading import read_config
from stoker.runtime.engine.options import EngineOptions
from stoker.runtime.engine.request import Delta, GenerationRequest, SamplingParams
from stoker.runtime.engine.weights import plan
from tests.coldstart.whole_load import load

pytestmark = [pytest.mark.real_model, pytest.mark.timeout(600)]

NEW_TOKENS = 8
TEXT = """The little ship left the harbour before dawn. Nobody on the quay waved, for nobody knew that it was leaving;
the captain had paid his debts at midnight, counted his crew twice, and told the cook to keep the fire low. By noon
they were past the last lighthouse, and the sea, which had been grey and sullen all week, turned a blue so deep that
the youngest of the sailors laughed out loud. Questions were asked that evening in the warm room behind the inn: """
CHATS = [
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "List the first five prime numbers.",
    "Translate 'good morning' into German, Spanish and Italian.",
    "def fib(n):",
    "Why is the sky blue? Answer in one sentence.",
    TEXT[:600],
    "",
]
LENGTHS = [1, 2, 3, 7, 15, 16, 17, 31, 33, 64, 150, 600]


@dataclass(frozen=True)
class Case:
    prompt: list[int]
    expected: list[int]
    finish_reason: str


@pytest.fixture(scope="module")
def prompts(smollm2_dir: Path) -> list[list[int]]:
    """8 chats and 12 plain texts of 1 to 600 tokens."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(smollm2_dir)
    chats = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=True
        )["input_ids"]
        for text in CHATS
    ]
    plain = tokenizer(TEXT * 10)["input_ids"]
    return chats + [plain[7 * i : 7 * i + length] for i, length in enumerate(LENGTHS)]


@pytest.fixture(scope="module")
def cases(smollm2_dir: Path, prompts: list[list[int]]) -> list[Case]:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(smollm2_dir, dtype=torch.float32).eval()
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    found: dict[int, Case] = {}
    for group in (order[start : start + 4] for start in range(0, len(order), 4)):
        found.update(zip(group, generated(model, [prompts[i] for i in group]), strict=True))
    return [found[i] for i in range(len(prompts))]


@torch.inference_mode()
def generated(model: Any, prompts: list[list[int]]) -> list[Case]:
    """Greedy continuations of a few prompts of similar length, padded on the left."""
    width = max(len(prompt) for prompt in prompts)
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    output = model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=NEW_TOKENS, pad_token_id=0)
    end = model.generation_config.eos_token_id
    made: list[Case] = []
    for prompt, row in zip(prompts, output[:, width:].tolist(), strict=True):
        stopped = end in row
        made.append(Case(prompt, row[: row.index(end)] if stopped else row, "stop" if stopped else "length"))
    return made


@pytest.fixture(scope="module")
def engine(smollm2_store_url: str) -> Engine:
    store = open_store(smollm2_store_url)
    manifest = read_manifest(store)
    config = read_config({name: store.read(name) for name in manifest.documents})
    options = EngineOptions(num_blocks=600, max_model_len=1024, max_seqs=8).resolve(config)
    weights = plan(config, options)
    load(store, manifest, weights.targets, connections=2, ring_slots=2)
    return Engine(config, options, weights, manifest.revision)


def run(engine: Engine, cases: list[Case], salt: bytes, count: int = NEW_TOKENS) -> list[Delta]:
    """Generates up to `count` tokens for all cases at once and checks them; the last delta of each."""
    tokens: dict[str, list[int]] = {}
    last: dict[str, Delta] = {}
    for i, case in enumerate(cases):
        params = SamplingParams(count, temperature=0.0)
        engine.submit(GenerationRequest(str(i), case.prompt, params, cache_salt=salt))
    while engine.has_work():
        for delta in engine.step():
            tokens.setdefault(delta.request_id, []).extend(delta.tokens)
            last[delta.request_id] = delta
    for i, case in enumerate(cases):
        reason = "length" if len(case.expected) >= count else case.finish_reason
        assert (tokens[str(i)], last[str(i)].finish_reason) == (case.expected[:count], reason), case.prompt[:20]
    return [last[str(i)] for i in range(len(cases))]


def test_it_knows_the_capital_of_france(cases: list[Case], smollm2_dir: Path) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(smollm2_dir / "tokenizer.json"))
    assert tokenizer.decode(cases[0].expected) == "The capital of France is Paris."
    assert cases[0].finish_reason == "stop"


def test_prompts_are_varied(cases: list[Case]) -> None:
    lengths = [len(case.prompt) for case in cases]
    assert (len(cases), min(lengths), max(lengths)) == (20, 1, 600)
    assert {case.finish_reason for case in cases} == {"stop", "length"}


def test_alone_without_and_with_a_prefix_hit(engine: Engine, cases: list[Case]) -> None:
    """The second time, every full block of the prompt is in the cache."""
    for case in cases:
        (cold,) = run(engine, [case], salt=repr(case.prompt).encode(), count=6)
        (warm,) = run(engine, [case], salt=repr(case.prompt).encode(), count=2)
        assert (cold.cached_tokens, warm.cached_tokens) == (0, (len(case.prompt) - 1) // 16 * 16)


def test_eight_at_a_time_without_and_with_a_prefix_hit(engine: Engine, cases: list[Case]) -> None:
    run(engine, cases, salt=b"batched")
    hits = [delta.cached_tokens for delta in run(engine, cases, salt=b"batched", count=4)]
    assert hits == [(len(case.prompt) - 1) // 16 * 16 for case in cases]
    stats = engine.stats()
    assert (stats["used_blocks"], stats["free_blocks"] + stats["cached_blocks"]) == (0, 600)
