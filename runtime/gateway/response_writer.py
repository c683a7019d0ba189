"""A model's text as OpenAI's response: its items, and the events that tell a stream's reader about them. Pure.

A whole response is written by the same hand as a stream, from the whole text at once, so that the two are the same.
"""

from collections.abc import Mapping
from typing import Any

from stoker.runtime.gateway.response_objects import ResponseObject, ResponseUsage
from stoker.runtime.gateway.response_schema import ResponseRequest
from stoker.runtime.gateway.shapes import Entries
from stoker.runtime.gateway.tool_calls import ToolSplitter, ToolStyle

Events = list[dict[str, Any]]


def response_object(request: ResponseRequest, id: str, created: int) -> ResponseObject:
    """As it is at its beginning."""
    given = request.model_dump(exclude_none=True, by_alias=True)
    return {
        "id": id,
        "object": "response",
        "created_at": created,
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "metadata": request.metadata or {},
        "model": request.model,
        "output": [],
        "parallel_tool_calls": True,
        "previous_response_id": request.previous_response_id,
        "reasoning": {"effort": None, "summary": None},
        "service_tier": "default",
        "store": request.keeps,
        "temperature": request.temperature,
        "text": {"format": {"type": "text"}, **given.get("text", {})},
        "tool_choice": given.get("tool_choice", "auto"),
        "tools": given.get("tools", []),
        "top_logprobs": request.top_logprobs or 0,
        "top_p": request.top_p,
        "truncation": "disabled",
        "usage": None,
        "user": request.user,
    }


def response_usage(usage: Mapping[str, Any]) -> ResponseUsage:
    asked, said = int(usage.get("prompt_tokens") or 0), int(usage.get("completion_tokens") or 0)
    return {
        "input_tokens": asked,
        "input_tokens_details": {"cached_tokens": int(usage.get("cached_tokens") or 0), "cache_write_tokens": 0},
        "output_tokens": said,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": asked + said,
    }


class ResponseWriter:
    """Pieces of the text in, events out: `begin`, any number of pieces, `end`. `response` is what has become of it."""

    def __init__(self, response: ResponseObject, tool_style: ToolStyle) -> None:
        self.response: Any = response
        self._key = response["id"].removeprefix("resp_")
        self._splitter = ToolSplitter(tool_style, f"call_{self._key}") if tool_style else None
        self._open: Any = None
        self._number = 0

    def begin(self) -> Events:
        return [self._event(f"response.{name}", response=dict(self.response)) for name in ("created", "in_progress")]

    def piece(self, text: str, entries: Entries) -> Events:
        """Log-probabilities only without tools: which of them a call's would be depends on how the text is cut."""
        if self._splitter is None:
            return self._text(text, entries) if text or entries else []
        return [event for delta in self._splitter.feed(text) for event in self._delta(delta)]

    def end(self, finish_reason: str, usage: Mapping[str, Any]) -> Events:
        """With the events of what is still open; an answer that is nothing at all is an empty message."""
        deltas = self._splitter.finish(cut=finish_reason == "length") if self._splitter else []
        events = [event for delta in deltas for event in self._delta(delta)]
        if not self.response["output"]:
            events += self._text("", None)
        status = "incomplete" if finish_reason == "length" else "completed"
        events += self._close(status)
        self.response |= {"status": status, "usage": response_usage(usage)}
        if status == "incomplete":
            self.response["incomplete_details"] = {"reason": "max_output_tokens"}
        return [*events, self._event(f"response.{status}", response=dict(self.response))]

    def _delta(self, delta: Mapping[str, Any]) -> Events:
        if "content" in delta:
            return self._text(delta["content"], None)
        function = delta["tool_calls"][0]
        if "id" in function:
            return [*self._close("completed"), *self._call(function)]
        self._open["arguments"] += function["function"]["arguments"]
        return [self._about("response.function_call_arguments.delta", delta=function["function"]["arguments"])]

    def _text(self, text: str, entries: Entries) -> Events:
        events: Events = []
        if self._open is None or self._open["type"] != "message":
            events = [*self._close("completed"), *self._message()]
        message: Any = self._open
        part = message["content"][0]
        part["text"] += text
        part["logprobs"] += entries or []
        if text or entries:
            told = {"delta": text, "logprobs": list(entries or [])}
            events.append(self._about("response.output_text.delta", content_index=0, **told))
        return events

    def _message(self) -> Events:
        added = self._add({"type": "message", "role": "assistant", "content": []}, "msg")
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        self._open["content"].append(part)
        return [added, self._about("response.content_part.added", content_index=0, part=copied(part))]

    def _call(self, call: Mapping[str, Any]) -> Events:
        name = call["function"]["name"]
        return [self._add({"type": "function_call", "call_id": call["id"], "name": name, "arguments": ""}, "fc")]

    def _add(self, item: dict[str, Any], prefix: str) -> dict[str, Any]:
        output: list[Any] = self.response["output"]
        self._open = {"id": f"{prefix}_{self._key}-{len(output)}", "status": "in_progress", **item}
        output.append(self._open)
        return self._event("response.output_item.added", output_index=len(output) - 1, item=copied(self._open))

    def _close(self, status: str) -> Events:
        """Of the item that is written at the moment."""
        item, events = self._open, []
        if item is None:
            return []
        if item["type"] == "message":
            part = item["content"][0]
            told = {"text": part["text"], "logprobs": part["logprobs"]}
            events.append(self._about("response.output_text.done", content_index=0, **told))
            events.append(self._about("response.content_part.done", content_index=0, part=part))
        else:
            told = {"name": item["name"], "arguments": item["arguments"]}
            events.append(self._about("response.function_call_arguments.done", **told))
        item["status"] = status
        index = len(self.response["output"]) - 1
        events.append(self._event("response.output_item.done", output_index=index, item=item))
        self._open = None
        return events

    def _about(self, type: str, **fields: Any) -> dict[str, Any]:
        """An event of the open item."""
        index = len(self.response["output"]) - 1
        return self._event(type, item_id=self._open["id"], output_index=index, **fields)

    def _event(self, type: str, **fields: Any) -> dict[str, Any]:
        self._number += 1
        return {"type": type, "sequence_number": self._number - 1, **fields}


def copied(value: dict[str, Any]) -> dict[str, Any]:
    """As it is now: what is open goes on changing."""
    return {key: list(each) if isinstance(each, list) else each for key, each in value.items()}
