"""A tenant's chat template in a process of its own."""

import json
import signal
from collections.abc import Mapping, Sequence
from typing import Any

from stoker.runtime.gateway.chat_template import RENDER_S, Message, TemplateRefused
from stoker.runtime.gateway.confined_process import MEMORY_BYTES, ConfinedProcess, ProcessEnded, Refused


class IsolatedTemplate:
    """Renders as ChatTemplate does, one conversation at a time."""

    def __init__(self, source: str, tokens: Mapping[str, str]) -> None:
        template = line_of({"source": source, "tokens": dict(tokens)})
        self._confined = ConfinedProcess("template_child", was_idle, template)
        self._asked()

    def render(self, messages: Sequence[Message], tools: Sequence[Message] = ()) -> str:
        """The prompt up to and including the header of the assistant's next turn. Raises TemplateRefused."""
        return self._asked(line_of({"messages": [dict(each) for each in messages], "tools": list(tools)}))

    def _asked(self, question: bytes = b"") -> str:
        try:
            return self._confined.ask(question)
        except Refused as refusal:
            raise TemplateRefused(str(refusal)) from None
        except ProcessEnded as ended:
            raise TemplateRefused(why(ended.code)) from None


def was_idle(code: int) -> bool:
    return code not in (-signal.SIGPROF, -signal.SIGKILL)


def line_of(question: Mapping[str, Any]) -> bytes:
    return json.dumps(question).encode() + b"\n"


def why(code: int) -> str:
    if code == -signal.SIGPROF:
        return f"it took longer than {RENDER_S:g} s to render"
    return f"it ended its process (return code {code}): it may have needed more than {MEMORY_BYTES >> 20} MiB of memory"
