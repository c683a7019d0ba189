"""The process behind a tenant's checks of inputs, which the kernel ends when it uses too much. A question is a line
with two lengths, then a schema and an input of that many bytes; the answer is a JSON line."""

import json
import signal
import sys
from functools import lru_cache
from typing import Any

from jsonschema_rs import Draft202012Validator

from stoker.runtime.gateway.confined_child import confine, next_line, say
from stoker.runtime.gateway.input_check import compiled, complaint_about, parts_in, weight_of
from stoker.runtime.gateway.input_process import CHECK_S
from stoker.runtime.requirement import InvalidSpec

KEPT = 64


def main() -> None:
    confine()
    while line := next_line():
        signal.setitimer(signal.ITIMER_PROF, CHECK_S)
        schema, body = (sys.stdin.buffer.read(int(length)) for length in line.split())
        answer(schema, body)
        signal.setitimer(signal.ITIMER_PROF, 0)


def answer(text: bytes, body: bytes) -> None:
    try:
        schema, fits, weight = kept(text)
    except InvalidSpec as problem:
        say("", str(problem))
        return
    complaint = complaint_about(schema, fits, json.loads(body), weight * parts_in(body)) if body else None
    say(json.dumps(complaint) if complaint else "")


@lru_cache(KEPT)
def kept(text: bytes) -> tuple[dict[str, Any], Draft202012Validator, int]:
    schema = json.loads(text)
    return schema, compiled(schema), weight_of(schema)


if __name__ == "__main__":
    main()
