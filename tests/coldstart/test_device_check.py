"""The checksum kernel against xxHash itself (in Triton's interpreter; on a GPU in tests/gpu), and what it finds."""

import os
import subprocess
import sys

import pytest
import torch

from stoker.coldstart.device_check import DeviceCheck
from stoker.coldstart.xxh3 import Part, fits, host_digest
from tests.coldstart.whole_load import load

KERNEL = """
import random
import torch
from stoker.coldstart.xxh3 import Part, digests, host_digest
torch.manual_seed(0)
rng = random.Random(0)
memory = torch.randint(0, 256, (120_000,), dtype=torch.uint8)
def scattered(size, cuts):
    edges = sorted({0, size, *(rng.randrange(1, size // 8) * 8 for _ in range(cuts))})
    spots = (rng.randrange(0, (len(memory) - size) // 8) * 8 for _ in edges)
    return [Part(memory.data_ptr() + spot, b - a) for spot, a, b in zip(spots, edges, edges[1:])]
cases = [(248, 0), (256, 1), (1016, 0), (1024, 0), (1032, 1), (1088, 2), (8192, 0), (8200, 3), (40_000, 6)]
inputs = [scattered(*case) for case in cases]
assert digests(inputs, torch.device("cpu")) == [host_digest(parts) for parts in inputs]
"""


def test_the_kernel_equals_xxhash():
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, "-c", KERNEL], check=True, env=environment)


def test_the_loaded_bytes_are_the_published_ones(published):
    targets = published.targets()
    load(published.store, published.manifest, targets)
    check = DeviceCheck(published.manifest, targets)
    assert check.run() == check.converted == []


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "model.norm.weight"])
def test_a_changed_element_is_found_in_its_chunk(published, name: str):
    targets = published.targets()
    load(published.store, published.manifest, targets)
    targets[name].view(-1)[-1] += 1
    (tensor,) = [entry for entry in published.manifest.tensors if entry.name == name]
    last = tensor.offset + tensor.length - 1
    chunks = published.manifest.chunks
    (holding,) = [n for n, c in enumerate(chunks) if c.file == tensor.file and c.offset <= last < c.offset + c.length]
    assert DeviceCheck(published.manifest, targets).run() == [holding]


def test_converted_chunks_are_named(published):
    targets = published.targets()
    targets["model.norm.weight"] = targets["model.norm.weight"].double()
    load(published.store, published.manifest, targets)
    check = DeviceCheck(published.manifest, targets)
    assert check.run() == [] and 0 < len(check.converted) < len(published.manifest.chunks)


def test_what_fits_the_kernel():
    assert fits([Part(0, 248)]) and fits([Part(8, 200), Part(1024, 48)])
    assert not any(map(fits, ([Part(0, 240)], [Part(4, 248)], [Part(0, 249)])))


def test_parts_are_read_in_order():
    memory = torch.arange(256, dtype=torch.uint8)
    halves = [Part(memory.data_ptr() + 128, 128), Part(memory.data_ptr(), 128)]
    swapped = torch.cat([memory[128:], memory[:128]])
    assert host_digest(halves) == host_digest([Part(swapped.data_ptr(), 256)])
