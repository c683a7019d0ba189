from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

from stoker.runtime.engine.engine import Engine
from stoker.runtime.engine.kv_tier import Copies, HostTier
from stoker.runtime.engine.request import GenerationRequest, SamplingParams

if TYPE_CHECKING:
    from conftest import TinyModel

BLOCK_BYTES = 4096


def test_content_is_found_by_key_tokens_and_the_block_before() -> None:
    tier = HostTier(2)
    slot = tier.make_room(b"k", b"tokens", b"p")
    assert slot is not None and tier.make_room(b"k", b"tokens", b"p") is None
    assert tier.find(b"k", b"tokens", b"p") == slot
    assert tier.find(b"k", b"other", b"p") is None and tier.find(b"k", b"tokens", b"q") is None
    assert tier.make_room(b"k", b"other", b"p") == slot, "a collision takes the place of what was there"
    assert tier.find(b"k", b"tokens", b"p") is None


def test_the_longest_unused_gives_way() -> None:
    tier = HostTier(2)
    slots = {key: tier.make_room(key, b"", b"") for key in (b"a", b"b")}
    assert tier.find(b"a", b"", b"") is not None
    assert tier.make_room(b"c", b"", b"") == slots[b"b"]
    assert (tier.find(b"b", b"", b""), tier.find(b"a", b"", b"")) == (None, slots[b"a"])


def test_copies_go_to_the_host_and_back() -> None:
    cache = torch.randn(4, 2, 2, 16, 2, 8)
    first = cache[1].clone()
    copies = Copies(cache, 3)
    copies.save([(1, 2), (3, 0)])
    assert copies.saved() == [1, 3] and copies.saved() == []
    cache[1] = 0
    copies.restore([(2, 2)])
    assert cache[2].equal(first) and not cache[1].any()


def request(name: str, first: int, salt: bytes = b"") -> GenerationRequest:
    prompt = [(first + 7 * i) % 97 for i in range(40)]
    return GenerationRequest(
        name, prompt, SamplingParams(6, temperature=0.7, seed=first, ignore_eos=True), cache_salt=salt
    )


def run(engine: Engine, one: GenerationRequest) -> tuple[list[int], int]:
    """Its tokens, and how many of its prompt's came from a cache."""
    engine.submit(one)
    deltas = []
    while engine.has_work():
        deltas += engine.step()
    assert engine.stats()["used_blocks"] == 0
    return [token for delta in deltas for token in delta.tokens], deltas[-1].cached_tokens


@pytest.mark.parametrize("scheduling", ["on", "off"])
def test_what_the_device_evicted_comes_back_from_the_host(tiny: "TinyModel", scheduling: str) -> None:
    options = {"num_blocks": 6, "max_seqs": 1, "async_scheduling": scheduling}
    engine = tiny.engine(host_cache_bytes=40 * BLOCK_BYTES, **options)
    calm = tiny.engine(prefix_cache=False, **options)
    for first in range(8):
        assert run(engine, request(str(first), first)) == (run(calm, request(str(first), first))[0], 0)
    for first in range(8):
        assert run(engine, request(f"{first} again", first)) == (run(calm, request(f"{first} again", first))[0], 32)


def test_what_the_host_evicted_too_is_computed_again(tiny: "TinyModel") -> None:
    engine = tiny.engine(num_blocks=6, max_seqs=1, host_cache_bytes=4 * BLOCK_BYTES)
    first = run(engine, request("a", 1))
    for other in range(2, 8):
        run(engine, request(str(other), other))
    assert run(engine, request("b", 1)) == first == (first[0], 0)


def test_no_other_salt_finds_it(tiny: "TinyModel") -> None:
    engine = tiny.engine(num_blocks=6, max_seqs=1, host_cache_bytes=40 * BLOCK_BYTES)
    run(engine, request("a", 1, b"one"))
    for other in range(2, 8):
        run(engine, request(str(other), other))
    assert run(engine, request("b", 1, b"two"))[1] == 0
    assert run(engine, request("c", 1, b"one"))[1] == 32


def test_a_prompt_continues_on_the_host_what_the_device_has_the_beginning_of(tiny: "TinyModel") -> None:
    engine = tiny.engine(num_blocks=6, max_seqs=1, host_cache_bytes=40 * BLOCK_BYTES)
    long = request("long", 1)
    run(engine, long)
    for other in range(2, 8):
        run(engine, request(str(other), other))
    short = replace(long, id="short", prompt=long.prompt[:17])
    assert run(engine, short)[1] == 16
    assert run(engine, replace(long, id="again"))[1] == 32
