"""The engine process's part in the prompt cache's third tier: blocks of a model that goes to sleep are written to a
file, those of one that woke are read from it. The bytes move in a thread, while other models compute.

What is read becomes findable only when all of its bytes are there. Until a move has ended, its blocks are held, and
`wait_for` is to be called before they are taken away.
"""

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from stoker.runtime.engine.engine import Engine
from stoker.runtime.engine.kv_tier import Kept
from stoker.runtime.engine.prefix import BLOCK_TOKENS
from stoker.runtime.engine.sequence import blocks_for
from stoker.runtime.pool.prompt_choice import Candidate, hottest, is_cheaper, longest, parents
from stoker.runtime.pool.prompt_file import PromptsUnusable, Row, pack_head, read_head, same
from stoker.runtime.wire import Frame

MoreBlocks = Callable[[int], Sequence[int]]


@dataclass(slots=True, eq=False)
class Move:
    """`run` is the thread's part; `end` follows in the engine's thread, is told whether that went well, and says how
    many blocks it was."""

    path: str
    run: Callable[[], None]
    end: Callable[[bool], int]
    error: str = ""
    thread: threading.Thread | None = None


class PromptExchange:
    """All is called by the engine's thread. `send` takes frames for the agent; `remind` is given, by a move's thread,
    the frame that is to be handled then."""

    def __init__(self, send: Callable[[Frame], None], remind: Callable[[Frame], None]) -> None:
        self._send = send
        self._remind = remind
        self._moves: dict[str, Move] = {}
        self._restored: dict[str, set[bytes]] = {}

    def handle(self, model: str, engine: object, frame: Frame, more_blocks: MoreBlocks | None = None) -> None:
        """`more_blocks` are there for the asking. Every export and import is answered with the number of blocks."""
        if frame["t"] == "prompts moved":
            if self._moves.get(model) is frame["move"]:
                self.wait_for(model)
            return
        self.wait_for(model)
        try:
            if not isinstance(engine, Engine):
                raise PromptsUnusable("the model isn't loaded, or has no prompt cache")
            if frame["t"] == "export prompts":
                self._export(model, engine, frame)
            else:
                self._restore(model, engine, frame, more_blocks)
        except (PromptsUnusable, OSError) as error:
            self._tell(model, frame["path"], 0, str(error))

    def wait_for(self, model: str) -> None:
        """Nothing reads or writes the model's blocks any more after this."""
        if move := self._moves.pop(model, None):
            assert move.thread is not None
            move.thread.join()
            self._tell(model, move.path, move.end(not move.error), move.error)

    def drop(self, model: str) -> None:
        self.wait_for(model)
        self._restored.pop(model, None)

    def _export(self, model: str, engine: Engine, frame: Frame) -> None:
        """Writes what is worth keeping to the frame's `path`: no blocks when there is nothing, nothing new, or when to
        compute it again is quicker than to fetch it."""
        size = engine.kv.block_bytes
        chosen = hottest(candidates(engine), frame["bytes"] // size)
        known = self._restored.get(model) == {candidate.key for candidate in chosen}
        tokens = len(chosen) * BLOCK_TOKENS
        if known or not is_cheaper(len(chosen) * size, frame["bytes_s"], tokens, engine.pace.token_s):
            self._tell(model, frame["path"], 0)
            return
        places = parents(chosen)
        rows = [Row(c.key, parent, c.uses, c.tokens) for c, parent in zip(chosen, places, strict=True)]
        worth_s = longest(places) * BLOCK_TOKENS * engine.pace.token_s
        head = pack_head(frame["made_for"], computed(engine), rows, worth_s)
        sources = [memory(engine, candidate.on_host)[candidate.place] for candidate in chosen]
        held = [engine.pool.entries[candidate.key] for candidate in chosen if not candidate.on_host]
        engine.pool.take(held)

        def end(done: bool) -> int:
            engine.pool.release([entry.block for entry in held])
            return len(chosen) if done and all(is_still_there(engine, candidate) for candidate in chosen) else 0

        stream, limit = side_stream(engine), time.monotonic() + frame["within_s"]
        self._begin(model, Move(frame["path"], lambda: write(Path(frame["path"]), head, sources, stream, limit), end))

    def _restore(self, model: str, engine: Engine, frame: Frame, more_blocks: MoreBlocks | None) -> None:
        """Makes the blocks in the frame's `path` findable, as many as there is room for. The agent has checked the
        file's seal. Raises PromptsUnusable for a file that isn't this model's."""
        path = Path(frame["path"])
        head = read_head(path)
        same(head.computed, computed(engine))
        on_host = engine.copies is not None
        places = host_room(engine, len(head.rows)) if on_host else device_room(engine, len(head.rows), more_blocks)
        rows = head.rows[: len(places)]
        targets = [memory(engine, on_host)[place] for place in places]

        def end(done: bool) -> int:
            found = rows if done else []
            (enter_on_host if on_host else enter_on_device)(engine, found, places)
            self._restored[model] = {row.key for row in found}
            for row in found:
                engine.scheduler.uses.remember(row.key, row.uses)
            return len(found)

        stream = side_stream(engine)
        self._begin(model, Move(frame["path"], lambda: fill(path, head.start, targets, stream), end))

    def _begin(self, model: str, move: Move) -> None:
        def run() -> None:
            try:
                move.run()
            except (OSError, PromptsUnusable, RuntimeError) as error:
                # Its frames know the blocks' memory.
                move.error = f"{type(error).__name__}: {error}"
            self._remind({"t": "prompts moved", "model": model, "move": move})

        self._moves[model] = move
        move.thread = threading.Thread(target=run, daemon=True, name="prompts")
        move.thread.start()

    def _tell(self, model: str, path: str, blocks: int, error: str = "") -> None:
        self._send({"t": "prompts", "model": model, "path": path, "blocks": blocks, "error": error})


def computed(engine: Engine) -> dict[str, Any]:
    """With what, and how a block lies. Tenant and adapter are in the blocks' keys."""
    _, *shape = engine.runner.kv.shape
    return {
        "revision": engine.revision,
        "device": engine.options.device,
        "dtype": engine.options.arithmetic,
        "shape": shape,
        "block_bytes": engine.kv.block_bytes,
        "block_tokens": BLOCK_TOKENS,
    }


def candidates(engine: Engine) -> dict[bytes, Candidate]:
    """Blocks that were of use and are there, on the device if they are on both."""
    pool, tier, counts = engine.pool, engine.scheduler.tier, engine.scheduler.uses.counts
    kept = tier.kept if tier else {}
    found = {
        key: Candidate(key, kept[key].parent, kept[key].tokens, uses, kept[key].slot, on_host=True)
        for key, uses in counts.items()
        if key in kept
    }
    keys = {0: b"", **{entry.serial: entry.key for entry in pool.entries.values()}}
    for key, uses in counts.items():
        entry = pool.entries.get(key)
        if entry and entry.parent in keys:
            found[key] = Candidate(key, keys[entry.parent], entry.tokens, uses, entry.block)
    return found


def is_still_there(engine: Engine, candidate: Candidate) -> bool:
    """A slot isn't held while it is read."""
    if not candidate.on_host:
        return True
    kept = engine.scheduler.tier.kept.get(candidate.key) if engine.scheduler.tier else None
    return kept is not None and kept.slot == candidate.place


def memory(engine: Engine, on_host: bool) -> torch.Tensor:
    """Of all blocks, or slots."""
    if on_host:
        assert engine.copies is not None
        return engine.copies.host
    return engine.runner.kv


def host_room(engine: Engine, wanted: int) -> list[int]:
    """Slots that were never used: nothing is copied from or to them."""
    assert engine.scheduler.tier is not None
    free = engine.scheduler.tier.free
    return [free.pop() for _ in range(min(wanted, len(free)))]


def device_room(engine: Engine, wanted: int, more_blocks: MoreBlocks | None) -> list[int]:
    """Blocks that hold nothing, as long as the longest request still finds room beside them."""
    pool, spare = engine.pool, blocks_for(engine.options.max_model_len) + 1
    if more_blocks:
        engine.add_blocks(more_blocks(wanted + spare))
    return pool.allocate(max(0, min(wanted, pool.free - spare)))


def enter_on_host(engine: Engine, rows: Sequence[Row], slots: Sequence[int]) -> None:
    """What was computed meanwhile stays."""
    tier = engine.scheduler.tier
    assert tier is not None
    tier.free += slots[len(rows) :]
    for row, slot in zip(rows, slots, strict=False):
        if row.key in tier.kept:
            tier.free.append(slot)
        else:
            tier.kept[row.key] = Kept(slot, row.tokens, rows[row.parent].key if row.parent >= 0 else b"")


def enter_on_device(engine: Engine, rows: Sequence[Row], blocks: Sequence[int]) -> None:
    serials: list[int] = []
    for row, block in zip(rows, blocks, strict=False):
        parent = serials[row.parent] if row.parent >= 0 else 0
        serials.append(engine.pool.publish(block, row.key, row.tokens, parent))
    engine.pool.release(blocks)


def side_stream(engine: Engine) -> "torch.cuda.Stream | None":
    """Behind all that is queued on the device, and behind the copies of the second tier."""
    if not engine.runner.kv.is_cuda:
        return None
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    if engine.copies and engine.copies.stream:
        stream.wait_stream(engine.copies.stream)
    return stream


def on(stream: "torch.cuda.Stream | None") -> AbstractContextManager[Any]:
    if stream is None:
        return nullcontext()
    # What the host reads and writes itself is in order too.
    stream.synchronize()
    return torch.cuda.stream(stream)


def write(
    path: Path, head: bytes, blocks: Sequence[torch.Tensor], stream: "torch.cuda.Stream | None", limit: float
) -> None:
    with on(stream), open(path, "wb") as file:
        file.write(head)
        for block in blocks:
            if time.monotonic() > limit:
                raise TimeoutError("writing the blocks took too long")
            file.write(bytes_of(block.cpu()))


def fill(path: Path, start: int, blocks: Sequence[torch.Tensor], stream: "torch.cuda.Stream | None") -> None:
    with on(stream), open(path, "rb") as file:
        file.seek(start)
        for block in blocks:
            place = torch.empty_like(block, device="cpu") if block.is_cuda else block
            data = bytes_of(place)
            if file.readinto(data) != len(data):
                raise PromptsUnusable("it ends early")
            if block.is_cuda:
                block.copy_(place)


def bytes_of(block: torch.Tensor) -> memoryview:
    """Of one in host memory."""
    return block.view(torch.uint8).numpy().data.cast("B")
