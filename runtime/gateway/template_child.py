"""The process behind one tenant's chat template: a JSON line in, a JSON line out, and the kernel ends it when it uses
too much. The first line has the template's `source` and `tokens`, each later one the `messages` and `tools`."""

import json
import signal
import sys
from collections.abc import Mapping
from typing import Any

from stoker.runtime.gateway.chat_template import RENDER_S, ChatTemplate, TemplateRefused
from stoker.runtime.gateway.confined_child import confine, next_line, say
from stoker.runtime.gateway.confined_process import MOST_CHARACTERS


def main() -> None:
    confine()
    template: ChatTemplate | None = None
    while line := next_line():
        signal.setitimer(signal.ITIMER_PROF, RENDER_S)
        question = json.loads(line)
        if template is None:
            template = compiled(question)
        else:
            rendered(template, question)
        signal.setitimer(signal.ITIMER_PROF, 0)


def compiled(question: Mapping[str, Any]) -> ChatTemplate:
    """Ends the process, once it has said why, when the template is none."""
    try:
        template = ChatTemplate(question["source"], question["tokens"])
    except TemplateRefused as refusal:
        say("", str(refusal))
        sys.exit()
    say("")
    return template


def rendered(template: ChatTemplate, question: Mapping[str, Any]) -> None:
    try:
        text = template.render(question["messages"], question["tools"])
    except TemplateRefused as refusal:
        say("", str(refusal))
        return
    if len(text) > MOST_CHARACTERS:
        say("", f"it made more than {MOST_CHARACTERS} characters of them")
        return
    say(text)


if __name__ == "__main__":
    main()
