"""One language-model job on this host: its prompt, its choices' text so far, how an earlier attempt is continued."""

from collections.abc import Mapping, Sequence
from typing import Any

from stoker.queue.records import Claim, unpack
from stoker.runtime.worker.text import Decoder, TextStream

LogprobEntry = dict[str, Any]
COST_STEP = 128.0
HERE = ("stop", "include_stop", "n")
"""What the engine needn't know."""


class Choice:
    """Feeds token ids in, gives visible text out. What an earlier attempt emitted is not shown twice."""

    def __init__(self, params: Mapping[str, Any], decoder: Decoder, emitted: Sequence[Mapping[str, Any]]) -> None:
        self.prior = [token for chunk in emitted for token in chunk["ids"]]
        self.finish_reason: str | None = None
        self.charge: tuple[int, int, int] = (0, 0, 0)
        self._logprobs = [entry for chunk in emitted for entry in chunk.get("logprobs", ())]
        self._stream = TextStream(decoder, params.get("stop") or ())
        self._stream.feed(self.prior)
        self._already_shown = sum(len(chunk["text"]) for chunk in emitted) - len(self._stream.text)
        if self._stream.stopped:
            self.finish_reason = "stop"
        elif len(self.prior) >= params["max_tokens"]:
            self.finish_reason = "length"

    @property
    def text(self) -> str:
        return self._stream.text

    @property
    def tokens(self) -> int:
        return self._stream.tokens

    def absorb(self, tokens: Sequence[int], reason: str | None, logprobs: Sequence[LogprobEntry] = ()) -> str:
        """Newly visible text. `finish_reason` is set when this was the end; a stop string ends it by itself."""
        self._logprobs += logprobs
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

    def result(self) -> dict[str, Any]:
        logprobs = {"logprobs": self._logprobs[: self.tokens]} if self._logprobs else {}
        return {"text": self.text, "finish_reason": self.finish_reason, **logprobs}

    def _fresh(self, shown: str) -> str:
        if not self._already_shown:
            return shown
        skipped = min(self._already_shown, len(shown))
        self._already_shown -= skipped
        return shown[skipped:]


class Answer:
    """The choices of one job: `n` answers to the same prompt, with seeds that follow each other."""

    def __init__(self, claim: Claim, decoder: Decoder, body: Mapping[str, Any] | None = None) -> None:
        """`body` is the payload, where that has been read already."""
        asked: Mapping[str, Any] = body or unpack(claim.payload)
        self.claim = claim
        self.prompt: list[int] = asked["prompt_ids"]
        self.params: dict[str, Any] = asked["params"]
        self.public_tokens: int = asked.get("public_tokens", 0)
        self.adapter: str = asked.get("adapter", "")
        self.cached_tokens = 0
        self._told_cost = 0.0
        emitted = [unpack(chunk.data) for chunk in claim.chunks]
        self.choices = [
            Choice(self.params, decoder, [chunk for chunk in emitted if chunk.get("index", 0) == index])
            for index in range(self.params.get("n", 1))
        ]

    @property
    def cost(self) -> float:
        """Tokens computed, output weighted twice (Virtual Token Counter, OSDI '24); cached prompt tokens are free."""
        return len(self.prompt) - self.cached_tokens + 2.0 * sum([choice.tokens for choice in self.choices])

    def grown_cost(self) -> float:
        """The cost so far whenever it has grown by COST_STEP, else 0."""
        cost = self.cost
        if cost < self._told_cost + COST_STEP:
            return 0.0
        self._told_cost = cost
        return cost

    @property
    def unfinished(self) -> list[int]:
        return [index for index, choice in enumerate(self.choices) if choice.finish_reason is None]

    def engine_params(self, index: int = 0) -> dict[str, Any]:
        """Of one choice; stop strings stay here. Its seed is within 64 bits, whatever the first one's is."""
        params = {name: value for name, value in self.params.items() if name not in HERE}
        if index:
            params["seed"] = (params.get("seed", 0) + index + 2**63) % 2**64 - 2**63
        return params

    def result(self) -> dict[str, Any]:
        choices = [choice.result() for choice in self.choices]
        body = choices[0] if len(choices) == 1 else {"choices": choices}
        return {**body, "usage": self.usage()}

    def usage(self) -> dict[str, int]:
        """The prompt counts once. Cached are the tokens that were there before the first choice."""
        return {
            "prompt_tokens": len(self.prompt),
            "completion_tokens": sum(choice.tokens for choice in self.choices),
            "cached_tokens": self.cached_tokens,
        }

    def record(self) -> dict[str, Any]:
        """What this attempt has used so far."""
        adapter = {"adapter": self.adapter} if self.adapter else {}
        return {**self.usage(), **self.device_time(), **adapter}

    def device_time(self) -> dict[str, float]:
        """What the device has done for this attempt, in microseconds. It is the job's share of busy time, too: a device
        computes for several models, each of which is busy for longer."""
        prefill, decode, swap = (sum(times) for times in zip(*(choice.charge for choice in self.choices), strict=True))
        return {"prefill_us": prefill, "decode_us": decode, "swap_us": swap, "busy_ms": (prefill + decode) / 1000}
