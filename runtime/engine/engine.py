"""One loaded model: requests in, tokens out. A step is scheduled, launched on the device, and settled: its tokens are
read and booked. With asynchronous scheduling, a step is launched before the one before it is settled, so that the
device always has work; the tokens in between are known to the device alone."""

import logging
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import suppress
from typing import TYPE_CHECKING

import torch

from stoker.kernels import ops
from stoker.runtime.engine.blocks import BlockPool
from stoker.runtime.engine.config import ModelConfig
from stoker.runtime.engine.kv_tier import Copies, HostTier
from stoker.runtime.engine.options import EngineOptions
from stoker.runtime.engine.prefix import root_key
from stoker.runtime.engine.request import Delta, GenerationRequest, require, validate
from stoker.runtime.engine.runner import Launched, Runner
from stoker.runtime.engine.scheduler import Outcome, Scheduler, Work, delta
from stoker.runtime.engine.sequence import Sequence
from stoker.runtime.engine.sizing import free_bytes, kv_size
from stoker.runtime.engine.weights import ModelWeights

if TYPE_CHECKING:
    from stoker.runtime.engine.grammars import Follower, Grammars

COMPILE_PAUSE_S = 0.01

log = logging.getLogger(__name__)


class Engine:
    """Not thread-safe: one thread calls everything. Sampling depends on (seed, absolute position) only, so a request's
    tokens don't depend on its neighbours, on preemption, or on whether it was resumed."""

    def __init__(self, config: ModelConfig, options: EngineOptions, weights: ModelWeights, revision: str = "") -> None:
        """`weights` are filled and of the options' dtype. Raises NotEnoughMemory when the KV cache doesn't fit."""
        self.options = options = options.resolve(config)
        self.config = config = config.within(options.max_model_len)
        self.kv = kv_size(config, options, free_bytes(options.device))
        self.pool = BlockPool(self.kv.num_blocks)
        self.runner = Runner(config, options, weights, self.kv)
        slots = options.host_cache_bytes // self.kv.block_bytes
        self._copies = Copies(self.runner.kv, slots) if slots else None
        self.scheduler = Scheduler(
            self.pool,
            token_budget=options.token_budget,
            max_seqs=options.max_seqs,
            prefix_cache=options.prefix_cache,
            tier=HostTier(slots) if slots else None,
        )
        self._revision = revision
        self._in_flight: Launched | None = None
        self._sequences: dict[str, Sequence] = {}
        self._compiling: dict[str, Future[Follower]] = {}
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
        grammar = request.params.grammar
        if grammar:
            require(self.grammars is not None, "this model was loaded without a tokenizer: it can't follow a grammar")
            assert self.grammars is not None
            self._compiling[request.id] = self.grammars.compile(grammar)
        else:
            self.scheduler.add(sequence)
        self._sequences[request.id] = sequence

    def abort(self, request_id: str) -> None:
        """Frees what no step in flight still writes; the next step reports "abort", whatever the one in flight finds.
        An unknown or finished id is ignored."""
        if sequence := self._sequences.pop(request_id, None):
            self._outbox.append(delta(sequence, [], "abort"))
            self._remove(sequence)

    def step(self) -> list[Delta]:
        """Launches the next step and returns the tokens of the oldest one under way: with asynchronous scheduling the
        one before, so that the first call returns none."""
        if self._compiling:
            self._admit_compiled()
        work = self.scheduler.schedule()
        if not work and not self._in_flight and self._copies and self._move_blocks(wait=True):
            work = self.scheduler.schedule()
        self._move_blocks()
        if not work and not self._in_flight and len(self._sequences) > len(self._compiling):
            raise RuntimeError(f"no progress is possible: {self.stats()}")
        launched, failed = self._launch(work) if work else (None, False)
        before, self._in_flight = self._in_flight, launched
        deltas = self._settle(before) if before else []
        if launched and not self._finish(launched):
            failed, launched = True, None
            self._in_flight = None
        if failed:
            deltas += self._commit(work, [self._alone(item) for item in work])
        elif launched and self.options.async_scheduling == "off":
            self._in_flight = None
            deltas += self._settle(launched)
        earlier, self._outbox = self._outbox, []
        return earlier + deltas

    @property
    def arena(self) -> torch.Tensor:
        return self.runner.weights.arena

    @property
    def grammars(self) -> "Grammars | None":
        """Set it, and requests may ask for a grammar."""
        return self.runner.grammars

    @grammars.setter
    def grammars(self, grammars: "Grammars") -> None:
        self.runner.grammars = grammars

    @property
    def in_flight(self) -> Seq[Work]:
        """What the step under way computes."""
        return self._in_flight.work if self._in_flight else ()

    def has_work(self) -> bool:
        return bool(self._outbox or self._sequences or self._in_flight)

    def prepare_idle(self) -> bool:
        """Uses a moment without work to make later steps faster; False when there is nothing (more) to do."""
        return not self.has_work() and self.runner.capture_one()

    def fail_all(self, error: str) -> list[Delta]:
        """Ends every request with `error`."""
        deltas = [*self._outbox, *(delta(sequence, [], "error", error) for sequence in self._sequences.values())]
        for sequence in self._sequences.values():
            self._remove(sequence)
        self._sequences, self._outbox = {}, []
        if launched := self._in_flight:
            self._in_flight = None
            with suppress(Exception):
                launched.outcomes()
            self.scheduler.commit(launched.work, [Outcome(-1, error)] * len(launched.work))
        return deltas

    def stats(self) -> dict[str, int]:
        self._move_blocks()
        return {
            "running": len(self.scheduler.running),
            "waiting": len(self.scheduler.waiting),
            "free_blocks": self.pool.free,
            "cached_blocks": self.pool.cached,
            "used_blocks": self.pool.used,
            "total_blocks": self.pool.total,
            "prefix_hit_tokens": self.scheduler.hit_tokens,
            "host_hit_tokens": self.scheduler.host_hit_tokens,
            "computed_tokens": self.scheduler.computed_tokens,
            "preemptions": self.scheduler.preemptions,
            "steps": self._steps,
            "late_kernels": ops.late_kernels(),
            "graphs": len(self.runner.graphs),
            "graph_bytes": self.runner.graphs.bytes,
            "graph_steps": self.runner.graphs.replays,
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

    def _remove(self, sequence: Sequence) -> None:
        if compiling := self._compiling.pop(sequence.id, None):
            compiling.cancel()
        else:
            self.scheduler.remove(sequence)

    def _admit_compiled(self) -> None:
        """Sequences whose grammar is ready wait with the others from now on; without any others, this waits for one."""
        idle = len(self._sequences) == len(self._compiling) and not self._in_flight
        wait(self._compiling.values(), COMPILE_PAUSE_S if idle else 0, FIRST_COMPLETED)
        for id, compiling in [item for item in self._compiling.items() if item[1].done()]:
            del self._compiling[id]
            sequence = self._sequences[id]
            try:
                sequence.follower = compiling.result()
                self.scheduler.add(sequence)
            except Exception as error:
                del self._sequences[id]
                self._outbox.append(delta(sequence, [], "error", str(error)))

    def _move_blocks(self, wait: bool = False) -> bool:
        """Between the tiers of the prompt cache; loads before the launch of the step that was planned with them. True
        when blocks came free."""
        if self._copies is None:
            return False
        loads, self.scheduler.loads = self.scheduler.loads, []
        saves, self.scheduler.saves = self.scheduler.saves, []
        if saves:
            self._copies.save(saves)
        if loads:
            self._copies.restore(loads)
        saved = self._copies.saved(wait)
        for block in saved:
            self.pool.release([block])
        return bool(saved)

    def _launch(self, work: list[Work]) -> tuple[Launched | None, bool]:
        """The step under way, or None and True when it couldn't be launched."""
        self._steps += 1
        try:
            return self.runner.launch(work), False
        except torch.AcceleratorError:
            # The device context is broken for good: the process has to be replaced.
            raise
        except Exception:
            log.exception("a step of %d sequences failed", len(work))
            return None, True

    def _finish(self, launched: Launched) -> bool:
        try:
            self.runner.finish(launched)
        except torch.AcceleratorError:
            raise
        except Exception:
            log.exception("sampling for %d sequences failed", len(launched.work))
            return False
        return True

    def _alone(self, item: Work) -> Outcome:
        """One sequence of a failed step by itself, so that only those to blame fail."""
        if item.sequence.ended:
            return Outcome(-1)
        try:
            return self.runner.run([item])[0]
        except torch.AcceleratorError:
            raise
        except Exception as error:
            return Outcome(-1, f"{type(error).__name__}: {error}")

    def _settle(self, launched: Launched) -> list[Delta]:
        return self._commit(launched.work, launched.outcomes())

    def _commit(self, work: Seq[Work], outcomes: Seq[Outcome]) -> list[Delta]:
        deltas = self.scheduler.commit(work, outcomes)
        self._move_blocks()
        for item in deltas:
            if item.finish_reason:
                del self._sequences[item.request_id]
        self.runner.may_capture |= bool(deltas)
        return deltas
