"""What each request has of a step. Pure."""

from collections.abc import Sequence

from stoker.runtime.engine.prefix import BLOCK_TOKENS
from stoker.runtime.engine.scheduler import Work
from stoker.runtime.pool.meter import Part

TOKENS_PER_READ = {"cuda": 150, "cpu": 4}
"""With so many tokens a step's arithmetic takes as long as reading the weights (an H200: 600 TFLOPS, 4 TB/s)."""


def parts_of(work: Sequence[Work], weights: int, block: int, tokens_per_read: int) -> list[Part]:
    """In bytes that the device moves, or could have moved meanwhile: the rows share the `weights`; the tokens'
    arithmetic and the context, in blocks of `block` bytes, come on top."""
    alive = [item for item in work if not item.sequence.ended]
    token, entry = weights / tokens_per_read, block / BLOCK_TOKENS
    fixed = weights / len(alive) if alive else 0.0
    return [
        (
            item.sequence.id,
            fixed + item.count * token + (item.start + item.count) * entry,
            item.count > 1 or item.start < item.sequence.prompt_tokens,
        )
        for item in alive
    ]
