"""The process behind one tenant's chat template: a JSON line in, a JSON line out, and the kernel ends it when it uses
too much. The first line has the template's `source` and `tokens`, each later one the `messages` and `tools`."""

import json
import os
import resource
import signal
import sys
from collections.abc import Mapping
from typing import Any

from stoker.runtime.gateway.chat_template import RENDER_S, ChatTemplate, TemplateRefused
from stoker.runtime.gateway.template_process import MEMORY_BYTES, MOST_CHARACTERS

IDLE_S = 60.0
NICE = 5


def confine() -> None:
    """By default both timers' signals end the process, also in the middle of a single call into C."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.nice(NICE)
    for number in (signal.SIGALRM, signal.SIGPROF):
        signal.signal(number, signal.SIG_DFL)


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


def next_line() -> bytes:
    signal.setitimer(signal.ITIMER_REAL, IDLE_S)
    return sys.stdin.buffer.readline()


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


def say(text: str, refused: str | None = None) -> None:
    told = refused if refused is None else refused[:2000]
    sys.stdout.buffer.write(json.dumps({"text": text, "refused": told}).encode() + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
