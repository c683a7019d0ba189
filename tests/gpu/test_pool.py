"""Models that take turns on a GPU with little memory: the tokens of each are those it has alone, whatever was where."""

import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from benchmarks.pool_device import Device
from stoker.coldstart.publish import publish
from stoker.coldstart.store import open_store
from tests.gpu.test_engine import HF_CONFIG, STATE

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

NAMES = ("one", "two", "three")
OPTIONS = {"dtype": "float32", "max_model_len": 1024, "max_seqs": 8, "token_budget": 512, "prefix_cache": False}
TIGHT = 296 << 20
"""Of which 262 MiB are for steps, libraries and graphs. A model needs 20 of the others."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("published")
    save_file({name: tensor.nan_to_num() for name, tensor in STATE.items()}, source / "model.safetensors")
    (source / "config.json").write_text(json.dumps(HF_CONFIG))
    publish(source, open_store(target.as_uri()))
    return target


@pytest.fixture
def tight(folder: Path) -> Iterator[Device]:
    with Device(TIGHT) as device:
        for variant, name in enumerate(NAMES):
            device.load(name, folder, variant, **OPTIONS)
        yield device


def test_swapped_models_answer_as_if_alone_and_no_memory_is_lost(folder: Path, tight: Device) -> None:
    alone = {}
    for variant, name in enumerate(NAMES):
        with Device(TIGHT) as device:
            device.load(name, folder, variant, **OPTIONS)
            for number in range(4):
                alone[name, number] = device.ask(name, prompt(number), 8).wait().tokens
    order, sizes = random.Random(0), []
    for _ in range(60):
        name, number = order.choice(NAMES), order.randrange(4)
        assert tight.ask(name, prompt(number), 8).wait().tokens == alone[name, number]
        sizes.append(torch.cuda.mem_get_info()[0])
    assert len({tuple(tokens) for tokens in alone.values()}) > 4
    assert tight.stats()["swaps"]["count"] >= 10
    assert sizes[-1] >= sizes[20] - (64 << 20)


def test_many_requests_for_all_of_them_at_once(tight: Device) -> None:
    replies = [tight.ask(NAMES[number % 3], prompt(number), 40, tenant=f"t{number % 2}") for number in range(48)]
    assert all(len(reply.wait().tokens) == 40 for reply in replies)
    spent = tight.stats()["time"]
    assert spent["open"] == 0
    charged = sum(sum(reply.charge) for reply in replies)
    assert abs(charged - spent["busy"] - spent["swap"] + spent["wasted"]) <= 0.01 * spent["wall"]


def prompt(number: int) -> list[int]:
    return [(number * 31 + place * 17) % 4000 for place in range(1, 40 + number)]
