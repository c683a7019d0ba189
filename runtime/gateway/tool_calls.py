"""Tool calls in a model's text, in the two forms that chat templates ask for, split off piece by piece.

`hermes` (Qwen2.5, Qwen3): <tool_call>{"name": ..., "arguments": {...}}</tool_call>, as often as wanted, amid content.
`llama` (Llama 3.x): the whole text is {"name": ..., "parameters": {...}}. What turns out to be no call is content. A
call's arguments are passed on as the model writes them. Nothing here depends on where the pieces are cut.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

ToolStyle = Literal["", "hermes", "llama"]
ToolDelta = dict[str, Any]

OPEN, CLOSE = "<tool_call>", "</tool_call>"
HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*"((?:[^"\\]|\\.)*)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\S)')

# Of a head that was cut off behind its name, and what may follow there.
CUT_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*"((?:[^"\\]|\\.)*)"([^{]*)')
ARGUMENTS_FOLLOW = (',"arguments":', ',"parameters":')


def tool_style(template: str) -> ToolStyle:
    """How a chat template tells its model to call tools; "" for one that knows none."""
    if "tools" not in template:
        return ""
    if OPEN in template:
        return "hermes"
    return "llama" if '"parameters"' in template else ""


class JsonValue:
    """Finds the end of one JSON value that comes in pieces."""

    def __init__(self) -> None:
        self._depth = 0
        self._quoted = self._escaped = self._begun = False

    def feed(self, text: str) -> int | None:
        """How many characters of `text` belong to the value, if it ends there; None: all, and more may come."""
        for place, letter in enumerate(text):
            if self._quoted:
                self._quoted = self._escaped or letter != '"'
                self._escaped = letter == "\\" and not self._escaped
                if not self._quoted and not self._depth:
                    return place + 1
                continue
            if not self._depth and self._begun and letter in ",}] \n\t\r":
                return place
            self._begun = True
            self._quoted = letter == '"'
            self._depth += (letter in "{[") - (letter in "}]")
            if letter in "}]" and not self._depth:
                return place + 1
        return None


class ToolSplitter:
    """One choice's text in, deltas of its message out. `calls` counts the tools called so far."""

    def __init__(self, style: ToolStyle, prefix: str) -> None:
        """`prefix` makes call ids unique: they are prefix-0, prefix-1 and so on."""
        self._hermes = style == "hermes"
        self._prefix = prefix
        self._held = ""
        self._inside = not self._hermes
        self._value: JsonValue | None = None
        self._done = self._gap = self._plain = False
        self.calls = 0

    def feed(self, text: str) -> list[ToolDelta]:
        self._held += text
        found: list[ToolDelta] = []
        while delta := self._next():
            found.append(delta)
        return [delta for delta in found if delta != SKIP]

    def finish(self, *, cut: bool = False) -> list[ToolDelta]:
        """What was held back and is no call after all. `cut`: the text was to go on, so that a call whose name is there
        is one."""
        held, self._held = self._held, ""
        if self._value or self._done or not held:
            return []
        if cut and self._inside and (name := cut_name(held)):
            return [self._call(name)]
        return [content(OPEN + held if self._hermes and self._inside else held)]

    def _next(self) -> ToolDelta | None:
        if self._value:
            return self._argument()
        if self._done:
            return self._close()
        return self._head() if self._inside else self._outside()

    def _outside(self) -> ToolDelta | None:
        if self._gap:
            # White space behind a call is no content.
            self._held = self._held.lstrip()
            self._gap = not self._held
        before, opened, after = self._held.partition(OPEN)
        if opened:
            self._held, self._inside = after, True
            return content(before) if before else SKIP
        keep = held_length(self._held, OPEN)
        visible, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return content(visible) if visible else None

    def _head(self) -> ToolDelta | None:
        """The call's name, once what follows it shows that it is one."""
        start = self._held.lstrip()[:1]
        self._plain = self._plain or (not self._hermes and start not in ("", "{"))
        if self._plain:
            shown, self._held = self._held, ""
            return content(shown) if shown else None
        found = HEAD.match(self._held)
        if self._hermes and not found and CLOSE in self._held:
            broken, _, self._held = self._held.partition(CLOSE)
            self._inside = False
            return content(OPEN + broken + CLOSE)
        if not found:
            return None
        self._held, self._value = self._held[found.end() :], JsonValue()
        return self._call(json.loads(f'"{found[1]}"'))

    def _call(self, name: str) -> ToolDelta:
        """Its arguments follow, if they do."""
        index, self.calls = self.calls, self.calls + 1
        call = {"id": f"{self._prefix}-{index}", "type": "function", "function": {"name": name, "arguments": ""}}
        return {"tool_calls": [{"index": index, **call}]}

    def _argument(self) -> ToolDelta | None:
        assert self._value is not None
        if not self._held:
            return None
        end = self._value.feed(self._held)
        shown, self._held = (self._held, "") if end is None else (self._held[:end], self._held[end:])
        if end is not None:
            self._value, self._done = None, True
        if not shown:
            return SKIP
        return {"tool_calls": [{"index": self.calls - 1, "function": {"arguments": shown}}]}

    def _close(self) -> ToolDelta | None:
        """Behind a call: everything up to its end belongs to nobody."""
        if not self._hermes:
            self._held = ""
            return None
        _, closed, after = self._held.partition(CLOSE)
        if not closed:
            return None
        self._held, self._inside, self._done, self._gap = after, False, False, True
        return SKIP


def cut_name(text: str) -> str:
    """Of a call that ends before its arguments begin; "" for what may be something else."""
    found = CUT_HEAD.fullmatch(text)
    rest = "".join(found[2].split()) if found else ""
    follows = any(mark.startswith(rest) for mark in ARGUMENTS_FOLLOW)
    return str(json.loads(f'"{found[1]}"')) if found and follows else ""


SKIP: ToolDelta = {"skip": True}


def content(text: str) -> ToolDelta:
    return {"content": text}


def held_length(text: str, mark: str) -> int:
    """Length of the longest end of `text` that is a proper beginning of `mark`."""
    return next((size for size in range(min(len(mark) - 1, len(text)), 0, -1) if mark.startswith(text[-size:])), 0)


def message_of(deltas: Sequence[ToolDelta]) -> dict[str, Any]:
    """The content (None if there is none) and the tool calls that deltas add up to."""
    text = "".join(delta.get("content", "") for delta in deltas)
    calls: list[dict[str, Any]] = []
    for part in (part for delta in deltas for part in delta.get("tool_calls", ())):
        if "id" in part:
            calls.append({"id": part["id"], "type": "function", "function": dict(part["function"])})
        else:
            calls[part["index"]]["function"]["arguments"] += part["function"]["arguments"]
    return {"content": text or (None if calls else ""), **({"tool_calls": calls} if calls else {})}


def forced_grammar(style: ToolStyle, functions: Sequence[Mapping[str, Any]]) -> str:
    """Lark for an answer that is one call of one of `functions` (OpenAI's function objects)."""
    key = "arguments" if style == "hermes" else "parameters"
    rules = []
    for function in functions:
        properties = {"name": {"const": function["name"]}, key: function.get("parameters") or {"type": "object"}}
        schema = {"type": "object", "properties": properties, "required": ["name", key], "additionalProperties": False}
        rules.append(f"%json {json.dumps(schema)}")
    body = "\n".join(f"call{number}: {rule}" for number, rule in enumerate(rules))
    any_call = " | ".join(f"call{number}" for number in range(len(rules)))
    around = f'"{OPEN}\\n" call "\\n{CLOSE}"' if style == "hermes" else "call"
    return f"start: {around}\ncall: {any_call}\n{body}"
