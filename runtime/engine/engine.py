"""One loaded model: requests in, tokens out, one step at a time: schedule, prepare, forward, sample, commit."""

import logging
from collections.abc import Iterable
from collections.abc import Sequence as Seq

import torch

from stoker.runtime.engine.blocks import BlockPool
from stoker.runtime.engine.config import ModelConfig
from stoker.runtime.engine.options import EngineOptions
from stoker.runtime.engine.prefix import root_key
from stoker.runtime.engine.request import Delta, GenerationRequest, validate
from stoker.runtime.engine.runner import Runner
from stoker.runtime.engine.scheduler import Outcome, Scheduler, Work, delta
from stoker.runtime.engine.sequence import Sequence
from stoker.runtime.engine.sizing import free_bytes, kv_size
from stoker.runtime.engine.weights import ModelWeights

log = logging.getLogger(__name__)


class Engine:
    """Not thread-safe: one thread calls everything. Sampling depends on (seed, absolute position) only, so a request's
    tokens don't depend on its neighbours, on preemption, or on whether it was resumed."""

    def __init__(self, config: ModelConfig, options: EngineOptions, weights: ModelWeights, revision: str = "") -> None:
        """`weights` are filled and of the options' dtype. Raises NotEnoughMemory when the KV cache doesn't fit."""
        self.config = config
        self.options = options = options.resolve(config)
        self.kv = kv_size(config, options, free_bytes(options.device))
        self.pool = BlockPool(self.kv.num_blocks)
        self.runner = Runner(config, options, weights, self.kv)
        self.scheduler = Scheduler(
            self.pool,
            token_budget=options.token_budget,
            max_seqs=options.max_seqs,
            prefix_cache=options.prefix_cache,
        )
        self._revision = revision
        self._sequences: dict[str, Sequence] = {}
        self._outbox: list[Delta] = []
        self._arrivals = 0
        self._steps = 0

    def submit(self, request: GenerationRequest) -> None:
        """Raises ValueError for a request that can never run."""
        if request.id in self._sequences:
            raise ValueError(f"request {request.id!r} is already here")
        validate(request, self.config.vocab_size, self.options.max_model_len)
        self._arrivals += 1
        root = root_key(self._revision.encode(), self.options.dtype.encode(), request.cache_salt)
        sequence = Sequence.of(request, self._arrivals, root, self.config.eos_token_ids)
        if len(sequence.tokens) == sequence.end:
            self._outbox.append(delta(sequence, [], "length"))
            return
        self._sequences[request.id] = sequence
        self.scheduler.add(sequence)

    def abort(self, request_id: str) -> None:
        """Frees everything at once; the next step reports "abort". An unknown or finished id is ignored."""
        if sequence := self._sequences.pop(request_id, None):
            self._outbox.append(delta(sequence, [], "abort"))
            self.scheduler.remove(sequence)

    def step(self) -> list[Delta]:
        work = self.scheduler.schedule()
        if not work and self._sequences:
            raise RuntimeError(f"no progress is possible: {self.stats()}")
        self._steps += bool(work)
        deltas = self.scheduler.commit(work, self._outcomes(work) if work else [])
        for finished in (item.request_id for item in deltas if item.finish_reason):
            del self._sequences[finished]
        earlier, self._outbox = self._outbox, []
        return earlier + deltas

    def has_work(self) -> bool:
        return bool(self._outbox or self._sequences)

    def fail_all(self, error: str) -> list[Delta]:
        """Ends every request with `error`."""
        deltas = [*self._outbox, *(delta(sequence, [], "error", error) for sequence in self._sequences.values())]
        for sequence in self._sequences.values():
            self.scheduler.remove(sequence)
        self._sequences, self._outbox = {}, []
        return deltas

    def stats(self) -> dict[str, int]:
        return {
            "running": len(self.scheduler.running),
            "waiting": len(self.scheduler.waiting),
            "free_blocks": self.pool.free,
            "cached_blocks": self.pool.cached,
            "used_blocks": self.pool.used,
            "total_blocks": self.pool.total,
            "prefix_hit_tokens": self.scheduler.hit_tokens,
            "computed_tokens": self.scheduler.computed_tokens,
            "preemptions": self.scheduler.preemptions,
            "steps": self._steps,
        }

    def generate(self, requests: Iterable[GenerationRequest]) -> dict[str, list[int]]:
        """Runs requests to their end; tokens by request id. Raises RuntimeError when one of them fails."""
        tokens: dict[str, list[int]] = {}
        for request in requests:
            self.submit(request)
            tokens[request.id] = []
        while self.has_work():
            for item in self.step():
                if item.finish_reason == "error":
                    raise RuntimeError(f"request {item.request_id}: {item.error}")
                tokens[item.request_id] += item.tokens
        return tokens

    def _outcomes(self, work: Seq[Work]) -> list[Outcome]:
        """Runs a step. When it raises, every sequence runs alone, so that only those to blame fail."""
        try:
            return self.runner.run(work)
        except torch.AcceleratorError:
            # The device context is broken for good: the process has to be replaced.
            raise
        except Exception as error:
            log.exception("a step of %d sequences failed", len(work))
            if len(work) == 1:
                return [Outcome(-1, f"{type(error).__name__}: {error}")]
        return [outcome for item in work for outcome in self._outcomes([item])]
