"""One language-model job on this host: its prompt, its text so far, and how an earlier attempt is continued."""

from typing import Any

from stoker.queue.records import Claim, unpack
from stoker.runtime.worker.text import Decoder, TextStream


class Answer:
    """Feeds token ids in, gives visible text out. What an earlier attempt emitted is not shown twice."""

    def __init__(self, claim: Claim, decoder: Decoder) -> None:
        body = unpack(claim.payload)
        self.claim = claim
        self.prompt: list[int] = body["prompt_ids"]
        self.params: dict[str, Any] = body["params"]
        self.prior = [token for chunk in claim.chunks for token in unpack(chunk.data)["ids"]]
        self.finish_reason: str | None = None
        self.cached_tokens = 0
        self._stream = TextStream(decoder, self.params.get("stop") or ())
        self._stream.feed(self.prior)
        emitted = sum(len(unpack(chunk.data)["text"]) for chunk in claim.chunks)
        self._already_shown = emitted - len(self._stream.text)
        if self._stream.stopped:
            self.finish_reason = "stop"
        elif len(self.prior) >= self.params["max_tokens"]:
            self.finish_reason = "length"

    @property
    def text(self) -> str:
        return self._stream.text

    def absorb(self, tokens: list[int], reason: str | None) -> str:
        """Newly visible text. `finish_reason` is set when this was the end; a stop string ends it by itself."""
        shown = self._stream.feed(tokens)
        if self._stream.stopped:
            self.finish_reason = "stop"
        elif reason is not None:
            shown += self.finish(reason)
        return self._fresh(shown)

    def finish(self, reason: str) -> str:
        shown = self._stream.finish()
        self.finish_reason = "stop" if self._stream.stopped else reason
        return shown

    def engine_params(self) -> dict[str, Any]:
        """What the engine needs to know; stop strings stay here."""
        return {name: value for name, value in self.params.items() if name not in ("stop", "include_stop")}

    def result(self) -> dict[str, Any]:
        return {"text": self.text, "finish_reason": self.finish_reason, "usage": self.usage()}

    def usage(self) -> dict[str, int]:
        return {
            "prompt_tokens": len(self.prompt),
            "completion_tokens": self._stream.tokens,
            "cached_tokens": self.cached_tokens,
        }

    def _fresh(self, shown: str) -> str:
        skipped = min(self._already_shown, len(shown))
        self._already_shown -= skipped
        return shown[skipped:]
