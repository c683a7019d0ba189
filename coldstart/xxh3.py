"""XXH3-64 (xxHash's specification, github.com/Cyan4973/xxHash, doc/xxhash_spec.md) of bytes that lie on a GPU.

Inputs of more than 240 bytes go through eight 64-bit accumulators. Within a block of 1,024 bytes the additions to them
commute, so all blocks of all inputs are summed in parallel; what remains is a short chain over each input's block sums.
"""

import ctypes
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
import xxhash

BLOCK = 1024
LANES = 8
SHORTEST = 241
GROUP = 8
BATCH_BYTES = 4 << 30
MAX_INPUTS = 32_768
MASK = (1 << 64) - 1
jit: Any = triton.jit

PRIME32 = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D)
PRIME64 = (0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5)
AVALANCHE = 0x165667919E3779F9
START = (PRIME32[2], PRIME64[0], PRIME64[1], PRIME64[2], PRIME64[3], PRIME32[1], PRIME64[4], PRIME32[0])
SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221"
    "b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb"
    "170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
LAST_STRIPE = 121
MERGE = 11


class Part(NamedTuple):
    """`length` bytes at a device (or host) address."""

    address: int
    length: int


Input = Sequence[Part]
"""The parts of one input, in order."""


def prime() -> None:
    """Computes what no device decides of the names of the compiled kernels, for processes forked later."""
    for kernel in (_sum_blocks, _chain):
        _ = kernel.cache_key


def fits(parts: Input) -> bool:
    """Whether `digests` takes this input: every address and length a multiple of 8, more than 240 bytes in all."""
    whole = all(part.address % LANES == 0 and part.length % LANES == 0 for part in parts)
    return whole and sum(part.length for part in parts) >= SHORTEST


def host_digest(parts: Input) -> int:
    """The same for host memory, by xxHash itself: what `digests` is compared with."""
    state = xxhash.xxh3_64()
    for part in parts:
        state.update(memoryview((ctypes.c_uint8 * part.length).from_address(part.address)))
    return state.intdigest()


def digests(inputs: Sequence[Input], device: torch.device) -> list[int]:
    """XXH3-64 of every input; all of them fit. Queued on the current stream, which is waited for. Takes a sixteenth of
    at most 4 GiB of the inputs as scratch memory."""
    words = torch.tensor(signed([*secret_words(0, 24), *secret_words(LAST_STRIPE, LANES)]), device=device)
    found: list[int] = []
    for batch in batches(inputs):
        lengths = [sum(part.length for part in parts) for parts in batch]
        states = accumulators(batch, lengths, words).cpu().tolist()
        found += [merge([lane & MASK for lane in state], size) for state, size in zip(states, lengths, strict=True)]
    return found


def batches(inputs: Sequence[Input]) -> list[list[Input]]:
    made: list[list[Input]] = []
    room = 0
    for parts in inputs:
        size = sum(part.length for part in parts)
        if size > room or len(made[-1]) == MAX_INPUTS:
            made.append([])
            room = max(BATCH_BYTES, size)
        made[-1].append(parts)
        room -= size
    return made


def accumulators(inputs: Sequence[Input], lengths: Sequence[int], words: torch.Tensor) -> torch.Tensor:
    """The eight accumulators of each input before they are merged, int64[N, 8]."""
    blocks = [(length - 1) // BLOCK + 1 for length in lengths]
    parts = [part for one in inputs for part in one]
    starts = [start for one in inputs for start in running([part.length for part in one])]
    table = torch.tensor([starts, [part.address for part in parts]], device=words.device)
    rows = [running([len(one) for one in inputs]), running(blocks), list(lengths), [len(one) for one in inputs]]
    about = torch.tensor(rows, device=words.device)
    sums = torch.empty(sum(blocks), LANES, dtype=torch.int64, device=words.device)
    states = torch.empty(len(inputs), LANES, dtype=torch.int64, device=words.device)
    grid = (triton.cdiv(max(blocks), GROUP), len(inputs))
    _sum_blocks[grid](table, about, words, sums, len(parts), len(inputs), GROUP=GROUP, num_warps=4)
    start = torch.tensor(signed(START), device=words.device)
    _chain[(len(inputs),)](table, about, words, start, sums, states, len(parts), len(inputs), num_warps=1)
    return states


@jit
def _load(table_ptr, first, count, parts, position, mask):
    """The eight bytes at each `position` of an input whose parts are `first` to `first + count` of the table."""
    address = position * 0
    for part in range(first, first + count):
        start = tl.load(table_ptr + part)
        address = tl.where(position >= start, tl.load(table_ptr + parts + part) + position - start, address)
    word = tl.load(address.to(tl.pointer_type(tl.int64)), mask=mask, other=0)
    return word.to(tl.uint64, bitcast=True)


@jit
def _products(word, secret):
    key = word ^ secret
    return (key & 0xFFFFFFFF) * (key >> 32)


@jit(do_not_specialize=["parts", "inputs"])
def _sum_blocks(table_ptr, about_ptr, words_ptr, sums_ptr, parts, inputs, GROUP: tl.constexpr):
    """What each block adds to the accumulators; the last, partial one without the input's last stripe."""
    input = tl.program_id(1)
    first, base = tl.load(about_ptr + input), tl.load(about_ptr + inputs + input)
    length, count = tl.load(about_ptr + 2 * inputs + input), tl.load(about_ptr + 3 * inputs + input)
    block = tl.program_id(0).to(tl.int64) * GROUP + tl.arange(0, GROUP)
    if tl.program_id(0) * GROUP * 1024 < length:
        stripe, lane = tl.arange(0, 16), tl.arange(0, 8)
        stop = (length - 1) // 64 * 64
        position = block[:, None, None] * 1024 + stripe[None, :, None] * 64
        inside = (position < stop) & (lane[None, None, :] >= 0)
        word = _load(table_ptr, first, count, parts, position + lane[None, None, :] * 8, inside)
        other = _load(table_ptr, first, count, parts, position + (lane ^ 1)[None, None, :] * 8, inside)
        secret = tl.load(words_ptr + stripe[:, None] + lane[None, :]).to(tl.uint64, bitcast=True)
        added = tl.where(inside, _products(word, secret[None, :, :]) + other, 0)
        rows = (base + block)[:, None] * 8 + lane[None, :]
        total = tl.sum(added, axis=1).to(tl.int64, bitcast=True)
        tl.store(sums_ptr + rows, total, mask=(block * 1024 < length)[:, None])


@jit(do_not_specialize=["parts", "inputs"])
def _chain(table_ptr, about_ptr, words_ptr, start_ptr, sums_ptr, states_ptr, parts, inputs):
    input = tl.program_id(0)
    first, base = tl.load(about_ptr + input), tl.load(about_ptr + inputs + input)
    length, count = tl.load(about_ptr + 2 * inputs + input), tl.load(about_ptr + 3 * inputs + input)
    lane = tl.arange(0, 8)
    secret = tl.load(words_ptr + 16 + lane).to(tl.uint64, bitcast=True)
    state = tl.load(start_ptr + lane).to(tl.uint64, bitcast=True)
    whole = (length - 1) // 1024
    for begin in range(0, whole, 8):
        for step in tl.static_range(8):  # type: ignore[reportGeneralTypeIssues]
            block = begin + step
            added = tl.load(sums_ptr + (base + block) * 8 + lane, mask=lane * 0 + block < whole, other=0)
            mixed = state + added.to(tl.uint64, bitcast=True)
            mixed = (mixed ^ (mixed >> 47) ^ secret) * 0x9E3779B1
            state = tl.where(block < whole, mixed, state)
    state += tl.load(sums_ptr + (base + whole) * 8 + lane).to(tl.uint64, bitcast=True)
    position = length - 64 + lane.to(tl.int64) * 8
    every = lane >= 0
    word = _load(table_ptr, first, count, parts, position, every)
    other = _load(table_ptr, first, count, parts, length - 64 + (lane ^ 1).to(tl.int64) * 8, every)
    state += _products(word, tl.load(words_ptr + 24 + lane).to(tl.uint64, bitcast=True)) + other
    tl.store(states_ptr + input * 8 + lane, state.to(tl.int64, bitcast=True))


def merge(state: Sequence[int], length: int) -> int:
    secret = secret_words(MERGE, LANES)
    result = length * PRIME64[0]
    for lane in range(0, LANES, 2):
        product = (state[lane] ^ secret[lane]) * (state[lane + 1] ^ secret[lane + 1])
        result += (product & MASK) ^ (product >> 64)
    result &= MASK
    result = ((result ^ (result >> 37)) * AVALANCHE) & MASK
    return result ^ (result >> 32)


def secret_words(offset: int, count: int) -> tuple[int, ...]:
    return struct.unpack_from(f"<{count}Q", SECRET, offset)


def signed(words: Sequence[int]) -> list[int]:
    """The same 64 bits as torch's int64 takes them."""
    return [word - (1 << 64) if word >> 63 else word for word in words]


def running(sizes: Sequence[int]) -> list[int]:
    """The sum of all sizes before each one."""
    sums = [0]
    for size in sizes:
        sums.append(sums[-1] + size)
    return sums[:-1]
