"""One loaded text encoder: texts in, unit vectors out. A step takes waiting texts, oldest first, whoever asked for
them, up to the token budget."""

import logging
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from stoker.coldstart.arrival import Arrival
from stoker.runtime.encoder import bert
from stoker.runtime.encoder.bert import BertConfig, BertWeights
from stoker.runtime.engine.options import EngineOptions
from stoker.runtime.engine.request import Delta, EmbedRequest, check_tokens, require
from stoker.runtime.pool.meter import Part, Spent

log = logging.getLogger(__name__)

NON_FINITE = "the model produced non-finite values (NaN or infinity) for this text"


@dataclass(slots=True, eq=False)
class Running:
    id: str
    texts: Sequence[Sequence[int]]
    values: np.ndarray
    missing: int = field(init=False)

    def __post_init__(self) -> None:
        self.missing = len(self.texts)

    @property
    def tokens(self) -> int:
        return sum(map(len, self.texts))


class Embedder:
    """Not thread-safe. `weights` are filled and of the options' dtype; `options` are resolved."""

    def __init__(self, config: BertConfig, options: EngineOptions, weights: BertWeights) -> None:
        require(not options.batch_invariant, "batch_invariant is for language models: leave it out for a text encoder")
        self.config = config
        self.options = options
        self.computed_tokens = 0
        self._weights = weights
        self._requests: dict[str, Running] = {}
        self._waiting: deque[tuple[Running, int]] = deque()
        self._spent: list[Spent] = []
        self._steps = 0

    def submit(self, request: EmbedRequest) -> None:
        """Raises ValueError for what can never run."""
        texts = request.texts
        require(request.id not in self._requests, f"request {request.id!r} is already here")
        require(len(texts) > 0, "there is no text")
        longest = self.options.max_model_len
        for text in texts:
            require(0 < len(text) <= longest, f"a text of {len(text)} tokens is not within 1 to {longest}")
            check_tokens("text", text, self.config.vocab_size)
        running = Running(request.id, texts, np.empty((len(texts), self.config.hidden_size), np.float32))
        self._requests[request.id] = running
        self._waiting.extend((running, index) for index in range(len(texts)))

    def abort(self, request_id: str) -> None:
        """The texts that still wait are passed by. An unknown id is ignored."""
        self._requests.pop(request_id, None)

    def has_work(self) -> bool:
        return bool(self._requests)

    def suspend(self) -> list[Delta]:
        """Weights may be taken away after this, until it is told to `resume`: no step is ever under way between two."""
        return []

    def resume(self, weights: BertWeights) -> None:
        self._weights = weights

    def take_outbox(self) -> list[Delta]:
        return []

    def take_spent(self) -> list[Spent]:
        spent, self._spent = self._spent, []
        return spent

    @property
    def arena(self) -> torch.Tensor:
        return self._weights.arena

    def prepare_idle(self) -> bool:
        return False

    def step(self) -> list[Delta]:
        """Computes one batch; the answers that it completes."""
        began, batch = time.monotonic_ns(), self._take()
        if not batch:
            return []
        self._steps += 1
        try:
            values = self._compute([request.texts[index] for request, index in batch])
        except torch.AcceleratorError:
            raise
        except Exception as error:
            log.exception("a step of %d texts failed", len(batch))
            return self._fail({request for request, _ in batch}, f"{type(error).__name__}: {error}")
        parts: list[Part] = [(request.id, len(request.texts[index]), True) for request, index in batch]
        self._spent.append(Spent(parts, began, time.monotonic_ns()))
        return self._store(batch, values)

    def fail_all(self, error: str) -> list[Delta]:
        return self._fail(set(self._requests.values()), error)

    def stats(self) -> dict[str, int]:
        return {"waiting": len(self._waiting), "steps": self._steps, "computed_tokens": self.computed_tokens}

    def warm_up(self) -> None:
        """Short and long batches, so that no kernel is compiled while a request waits for it. Needs no weights yet."""
        longest = min(self.options.max_model_len, self.options.token_budget)
        weights, self._weights = self._weights, replace(self._weights, arrival=Arrival(0))
        for lengths in ([1], [longest], [min(16, longest)] * 32) if self.options.device == "cuda" else ():
            self._compute([[0] * length for length in lengths])
        self._weights, self.computed_tokens = weights, 0

    def _take(self) -> list[tuple[Running, int]]:
        """At least one text, as many as fit into the budget."""
        batch: list[tuple[Running, int]] = []
        room = self.options.token_budget
        while self._waiting:
            request, index = self._waiting[0]
            alive = self._requests.get(request.id) is request
            if alive and batch and len(request.texts[index]) > room:
                break
            self._waiting.popleft()
            if alive:
                batch.append((request, index))
                room -= len(request.texts[index])
        return batch

    @torch.inference_mode()
    def _compute(self, texts: Sequence[Sequence[int]]) -> np.ndarray:
        lengths = [len(text) for text in texts]
        ids = torch.tensor([token for text in texts for token in text], device=self.options.device)
        self.computed_tokens += sum(lengths)
        return bert.embed(self.config, self._weights, ids, lengths).cpu().numpy()

    def _store(self, batch: Sequence[tuple[Running, int]], values: np.ndarray) -> list[Delta]:
        finite = [bool(np.isfinite(value).all()) for value in values]
        done = self._fail({request for (request, _), fine in zip(batch, finite, strict=True) if not fine}, NON_FINITE)
        for (request, index), value in zip(batch, values, strict=True):
            request.values[index] = value
            request.missing -= 1
            if not request.missing and self._requests.pop(request.id, None):
                done.append(
                    Delta(request.id, [], "stop", prompt_tokens=request.tokens, vectors=request.values.tobytes())
                )
        return done

    def _fail(self, requests: set[Running], error: str) -> list[Delta]:
        for request in requests:
            self._requests.pop(request.id, None)
        return [Delta(request.id, [], "error", error) for request in requests]
