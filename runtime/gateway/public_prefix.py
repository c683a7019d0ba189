"""How much of a prompt is the text that its function's deployer has declared public."""

from collections.abc import Sequence
from functools import lru_cache
from itertools import takewhile

from stoker.runtime.gateway.chat_template import TemplateRefused
from stoker.runtime.gateway.prompts import PromptEncoder
from stoker.runtime.spec import FunctionSpec


def public_tokens(spec: FunctionSpec, encoder: PromptEncoder, chat: bool, ids: Sequence[int]) -> int:
    """The first so many of a prompt's `ids` are those of the public text; 0 when there is none."""
    if not spec.public_prefix:
        return 0
    public = public_ids(encoder, spec.public_prefix, chat)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(public, ids, strict=False)))


@lru_cache(maxsize=256)
def public_ids(encoder: PromptEncoder, text: str, chat: bool) -> tuple[int, ...]:
    """As the text alone, or as a conversation's system message. None where the model's template refuses those."""
    if not chat:
        return tuple(encoder.text(text))
    try:
        return tuple(encoder.chat([{"role": "system", "content": text}]))
    except TemplateRefused:
        return ()
