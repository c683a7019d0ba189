"""Jobs' results and pieces of them in OpenAI's shapes: whole answers and the chunks of streams."""

from collections.abc import Mapping, Sequence
from typing import Any

from stoker.runtime.gateway.answers import (
    ChatCompletion,
    ChatCompletionChunk,
    Completion,
    CompletionLogprobs,
    LogprobEntry,
    Usage,
)
from stoker.runtime.gateway.tool_calls import ToolSplitter, ToolStyle, message_of

Entries = Sequence[LogprobEntry] | None


def usage_object(usage: Mapping[str, Any]) -> Usage:
    prompt, completion = int(usage.get("prompt_tokens") or 0), int(usage.get("completion_tokens") or 0)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": int(usage.get("cached_tokens") or 0)},
    }


def choices_of(result: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """The choices of a job's result, which is one choice itself when no more were asked for."""
    return result.get("choices") or [result]


class ChatShape:
    """Builds the objects of one /v1/chat/completions answer. With a tool style, tool calls are split off the text."""

    def __init__(
        self, job_id: str, model: str, created: int, include_usage: bool = False, tool_style: ToolStyle = ""
    ) -> None:
        self._head = {"id": f"chatcmpl-{job_id}", "created": created, "model": model}
        self._tail: dict[str, Any] = {"usage": None} if include_usage else {}
        self._job_id = job_id
        self._tool_style: ToolStyle = tool_style
        self._splitters: dict[int, ToolSplitter] = {}

    def whole(self, result: Mapping[str, Any]) -> ChatCompletion:
        choices = [
            {
                "index": index,
                "message": {"role": "assistant", "refusal": None, **message},
                "logprobs": chat_logprobs(choice.get("logprobs")),
                "finish_reason": finish_of(choice["finish_reason"], "tool_calls" in message),
            }
            for index, choice in enumerate(choices_of(result))
            if (message := self._message(choice, index))
        ]
        body = {"object": "chat.completion", "choices": choices, "usage": usage_object(result["usage"])}
        return {**self._head, **body}  # type: ignore[return-value]

    def first(self, index: int = 0) -> ChatCompletionChunk | None:
        return self._chunk({"role": "assistant", "content": ""}, None, index)

    def text(self, text: str, index: int = 0, entries: Entries = None) -> ChatCompletionChunk:
        return self._chunk({"content": text}, None, index, entries)

    def split(self, text: str, index: int, entries: Entries) -> list[ChatCompletionChunk]:
        """The chunks of a piece of text: none while it may be part of a call's beginning."""
        deltas = self._splitter(index).feed(text) or ([{}] if entries else [])
        return [self._chunk(delta, None, index, None if n else entries) for n, delta in enumerate(deltas)]

    def rest(self, finish_reason: str, index: int) -> list[ChatCompletionChunk]:
        """Text that was held back as the beginning of a call, and was none, or was cut off in it."""
        deltas = self._splitter(index).finish(cut=finish_reason == "length") if self._tool_style else []
        return [self._chunk(delta, None, index) for delta in deltas]

    def last(self, finish_reason: str, index: int = 0) -> ChatCompletionChunk:
        called = index in self._splitters and self._splitters[index].calls > 0
        return self._chunk({}, finish_of(finish_reason, called), index)

    def usage(self, usage: Mapping[str, Any]) -> ChatCompletionChunk:
        body = {"object": "chat.completion.chunk", "choices": [], "usage": usage_object(usage)}
        return {**self._head, **body}  # type: ignore[return-value]

    def _splitter(self, index: int) -> ToolSplitter:
        if index not in self._splitters:
            self._splitters[index] = ToolSplitter(self._tool_style, f"call_{self._job_id}-{index}")
        return self._splitters[index]

    def _message(self, choice: Mapping[str, Any], index: int) -> dict[str, Any]:
        if not self._tool_style:
            return {"content": choice["text"]}
        splitter = self._splitter(index)
        return message_of([*splitter.feed(choice["text"]), *splitter.finish(cut=choice["finish_reason"] == "length")])

    def _chunk(
        self, delta: Mapping[str, Any], finish_reason: str | None, index: int, entries: Entries = None
    ) -> ChatCompletionChunk:
        choice = {"index": index, "delta": delta, "logprobs": chat_logprobs(entries), "finish_reason": finish_reason}
        return {**self._head, "object": "chat.completion.chunk", "choices": [choice], **self._tail}  # type: ignore[return-value]


def finish_of(reason: str, called: bool) -> str:
    return "tool_calls" if called and reason == "stop" else reason


def chat_logprobs(entries: Entries) -> dict[str, Any] | None:
    return {"content": list(entries), "refusal": None} if entries else None


class CompletionShape:
    """Builds the objects of one /v1/completions answer."""

    def __init__(self, job_id: str, model: str, created: int, include_usage: bool = False) -> None:
        self._head = {"id": f"cmpl-{job_id}", "object": "text_completion", "created": created, "model": model}
        self._tail: dict[str, Any] = {"usage": None} if include_usage else {}
        self._offsets: dict[int, int] = {}

    def whole(self, result: Mapping[str, Any]) -> Completion:
        choices = [
            choice_object(index, choice["text"], choice["finish_reason"], logprobs_object(choice.get("logprobs"), 0))
            for index, choice in enumerate(choices_of(result))
        ]
        return {**self._head, "choices": choices, "usage": usage_object(result["usage"])}  # type: ignore[return-value]

    def first(self, index: int = 0) -> Completion | None:
        return None

    def text(self, text: str, index: int = 0, entries: Entries = None) -> Completion:
        """Pieces come in order: token offsets go on from one to the next."""
        start = self._offsets.get(index, 0)
        self._offsets[index] = start + sum(map(characters, entries or ()))
        return self._chunk(choice_object(index, text, None, logprobs_object(entries, start)))

    def split(self, text: str, index: int, entries: Entries) -> list[Completion]:
        return [self.text(text, index, entries)]

    def rest(self, finish_reason: str, index: int) -> list[Completion]:
        return []

    def last(self, finish_reason: str, index: int = 0) -> Completion:
        return self._chunk(choice_object(index, "", finish_reason, None))

    def usage(self, usage: Mapping[str, Any]) -> Completion:
        return {**self._head, "choices": [], "usage": usage_object(usage)}  # type: ignore[return-value]

    def _chunk(self, choice: dict[str, Any]) -> Completion:
        return {**self._head, "choices": [choice], **self._tail}  # type: ignore[return-value]


def choice_object(
    index: int, text: str, finish_reason: str | None, logprobs: CompletionLogprobs | None
) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}


def logprobs_object(entries: Entries, start: int) -> CompletionLogprobs | None:
    """`start`: where in the text the first of the tokens begins."""
    if not entries:
        return None
    offsets = [start]
    for entry in entries:
        offsets.append(offsets[-1] + characters(entry))
    return {
        "tokens": [entry["token"] for entry in entries],
        "token_logprobs": [entry["logprob"] for entry in entries],
        "top_logprobs": [
            {each["token"]: each["logprob"] for each in [*entry["top_logprobs"], entry]} for entry in entries
        ],
        "text_offset": offsets[:-1],
    }


def characters(entry: LogprobEntry) -> int:
    """Characters that begin within a token: a UTF-8 character's further bytes don't count."""
    return sum(byte & 0xC0 != 0x80 for byte in entry["bytes"])


Shape = ChatShape | CompletionShape
