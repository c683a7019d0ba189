"""The device half of a step: describe it, upload, forward, sample. Owns the KV cache and all else that lives on the
device.

`launch` queues a step and returns at once on a GPU; its outcomes are asked for later. On a CPU the same calls compute
the step before they return: a stream whose work is always done, in the same order.
"""

from array import array
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from stoker.coldstart.arrival import Arrival
from stoker.kernels import ops
from stoker.runtime.engine import model
from stoker.runtime.engine.batch import Bucket, mark_sent, pack
from stoker.runtime.engine.blocks import NULL_BLOCK
from stoker.runtime.engine.config import ModelConfig
from stoker.runtime.engine.graphs import Computed, Graphs, fitting
from stoker.runtime.engine.options import EngineOptions
from stoker.runtime.engine.prefix import BLOCK_TOKENS
from stoker.runtime.engine.request import GenerationRequest, SamplingParams
from stoker.runtime.engine.rope import cos_sin
from stoker.runtime.engine.scheduler import Outcome, Work, rows_for
from stoker.runtime.engine.sequence import Sequence, blocks_for
from stoker.runtime.engine.sizing import KVSize, graph_reserve
from stoker.runtime.engine.state import Batch, Table
from stoker.runtime.engine.steering import Steered, Steering
from stoker.runtime.engine.weights import ModelWeights

if TYPE_CHECKING:
    from stoker.runtime.adapters.adapters import Adapters
    from stoker.runtime.engine.grammars import Grammars

PROMPT_SIZES = (17, 600, 4096)
NON_FINITE = "the model produced non-finite values (NaN or infinity) for this request"


@dataclass(slots=True)
class Launched:
    """A step under way. `computed` waits to be steered (None: that is done, or not needed). `tokens` are on the host
    once `copied` (None: at once) has happened."""

    work: Seq[Work]
    computed: Computed | None
    tokens: torch.Tensor
    steered: Steered | None = None
    copied: torch.cuda.Event | None = None
    began_ns: int = 0

    def outcomes(self) -> list[Outcome]:
        """Waits for the step."""
        if self.copied:
            self.copied.synchronize()
        found = [outcome(token) for token in islice(self.tokens.tolist(), len(self.work))]
        if self.steered:
            for place, error in self.steered.errors.items():
                found[place] = Outcome(-1, error, refused=True)
            for place, report in self.steered.reports().items():
                if not found[place].error:
                    found[place] = found[place]._replace(logprobs=report)
        return found


class Runner:
    """`options` are resolved."""

    def __init__(
        self,
        config: ModelConfig,
        options: EngineOptions,
        weights: ModelWeights,
        size: KVSize,
        cache: torch.Tensor | None = None,
        adapters: "Adapters | None" = None,
    ) -> None:
        self._config = config
        self._options = options
        self.weights = weights
        self._adapters = adapters
        self.kv = cache if cache is not None else allocate_kv(config, options, size)
        self.cos_sin = cos_sin(config.rope, config.head_dim, options.max_model_len, options.device)
        largest = Bucket(options.max_seqs, options.token_budget)
        rows, width = rows_for(options.max_seqs), blocks_for(options.max_model_len)
        self.table = Table(rows, width, largest, options.device)
        self.limit_graphs(graph_reserve(config, options))
        self.grammars: Grammars | None = None
        self.may_capture = False
        # Kinds of steps that are to be run yet; None stands for steered rows.
        self._cold: list[Shape | None] = []
        self._steering = Steering(config.vocab_size, options.device, options.batch_invariant)
        self._on_gpu = options.device == "cuda"
        self._results = [torch.zeros(options.max_seqs, dtype=torch.int64, pin_memory=self._on_gpu) for _ in range(2)]

    def limit_graphs(self, size: int) -> None:
        """There are none at first."""
        self._graph_bytes = size
        self.graphs = Graphs(self._config, self._options, size)

    def rebind(self, weights: ModelWeights) -> None:
        """Other weights of the same model from now on. Graphs are for the addresses with which they were captured."""
        if weights.arena.data_ptr() != self.weights.arena.data_ptr():
            self.limit_graphs(self._graph_bytes)
        self.weights = weights

    @torch.inference_mode()
    def launch(self, work: Seq[Work]) -> Launched:
        """Queues one step. Before it, the outcomes of the step before the last must have been asked for. May be called
        again with the same work once its input tokens are known: it writes the same values to the same places."""
        bucket = self._receive(work)
        # A graph waits for no weights that are on their way.
        is_here = self.weights.arrival.done
        computed = self.graphs.replay(bucket) if is_here else None
        if computed is None:
            launched = self._launched(work, self._compute(bucket))
            if self.may_capture and is_here and launched.computed is None:
                self.graphs.capture(bucket, self._compute)
            return launched
        return self._launched(work, computed)

    @torch.inference_mode()
    def finish(self, launched: Launched) -> None:
        """Completes a step whose rows ask for more than plain sampling, before the next one is launched. The outcomes
        of the step before must have been committed: what comes next may depend on their tokens."""
        if computed := launched.computed:
            launched.computed = None
            launched.steered = self._steering.sample(
                launched.work, computed.logits, computed.tokens, self.table.last_token, self.grammars
            )
            self._hand_over(launched)

    def run(self, work: Seq[Work]) -> list[Outcome]:
        launched = self.launch(work)
        self.finish(launched)
        return launched.outcomes()

    @torch.inference_mode()
    def batch(self, work: Seq[Work]) -> Batch:
        """The tensors of a step, as `launch` makes them."""
        return self.table.batch(self._receive(work))

    def warm_up(self, restored: bool = False) -> dict[str, int]:
        """Runs every kind of step once on a GPU, so that no kernel is ever compiled or loaded while a request waits for
        it. A few layers stand for all, and may be empty still: nothing here waits for weights. Where all kernels were
        `restored`, that is left to idle moments, the first of which come while the weights arrive. Returns how many
        kernels this process has compiled, and found compiled, up to now."""
        if not self._on_gpu:
            return {}
        from stoker.kernels.launch import origins

        self._cold = [*warm_up_shapes(self._options), None]
        while self._cold and not restored:
            self._warm_one()
        return {f"kernels_{name}": origins()[name] for name in ("compiled", "restored")}

    def _warm_one(self) -> None:
        from stoker.kernels.launch import warming_up

        shape = self._cold.pop(0)
        weights, self.weights = self.weights, samples_of(self.weights, self._config.windows)
        try:
            with warming_up():
                if shape:
                    self.run([self.dummy_work(shape.start, shape.tokens)] * shape.sequences)
                else:
                    self._steering.warm_up()
        finally:
            self.weights = weights
        self.kv[NULL_BLOCK].zero_()

    @torch.inference_mode()
    def capture_one(self) -> bool:
        """Captures the graph of one more bucket, once every kind of step is warm; False when there is nothing (more) to
        do, or not yet."""
        if self._cold:
            self._warm_one()
            return True
        bucket = self.graphs.next_missing() if self.may_capture else None
        if bucket is None:
            return False
        self._receive([], bucket)
        self._compute(bucket)
        self.graphs.capture(bucket, self._compute)
        return True

    def dummy_work(self, start: int, count: int) -> Work:
        """In the row that belongs to nobody, on the null block, whose content never matters."""
        request = GenerationRequest(id="", prompt=[0] * (start + count), params=SamplingParams(max_tokens=1))
        sequence = Sequence.of(request, arrival=0, root=b"", eos=())
        sequence.blocks = array("i", [NULL_BLOCK] * blocks_for(start + count))
        sequence.row, sequence.sent_blocks = self.table.padding_row, len(sequence.blocks)
        return Work(sequence, start, count, samples=True)

    def _receive(self, work: Seq[Work], bucket: Bucket | None = None) -> Bucket:
        exact = Bucket(len(work), sum(item.count for item in work))
        bucket = bucket or fitting(self.graphs.choices, *exact) or exact
        table = self.table
        table.receive(pack(work, bucket, table.padding_row, table.width, table.next_buffer()))
        mark_sent(work)
        return bucket

    def _compute(self, bucket: Bucket) -> Computed:
        """A sampled token is -1 where a sequence's values aren't finite."""
        batch = self.table.batch(bucket)
        with ops.batch_invariant(self._options.batch_invariant):
            alone = self._options.batch_invariant and not self._on_gpu
            computed = self._one_by_one(batch) if alone else self._sampled(batch, self._forward(batch))
        self.table.keep(batch, computed.tokens)
        return computed

    def _forward(self, batch: Batch) -> torch.Tensor:
        adapted = self._adapters.adapted(batch, self.table) if self._adapters else None
        return model.forward(self._config, self.weights, self.cos_sin, self.kv, batch, adapted)

    def _sampled(self, batch: Batch, hidden: torch.Tensor) -> Computed:
        scores = model.logits(self.weights, hidden)
        params = (batch.temperature, batch.top_k, batch.top_p, batch.min_p, batch.seed, batch.position)
        return Computed(ops.sample(scores, *params), scores)

    def _one_by_one(self, batch: Batch) -> Computed:
        """In which order a CPU's libraries add depends on shapes alone, and here these are always the same."""
        found = [self._sampled(own[-1], [self._forward(token) for token in own][-1]) for own in batch.singles()]
        return Computed(*map(torch.cat, zip(*found, strict=True)))

    def _launched(self, work: Seq[Work], computed: Computed) -> Launched:
        launched = Launched(work, None, computed.tokens)
        if any(item.samples and item.sequence.params.steered for item in work):
            launched.computed = computed
        else:
            self._hand_over(launched)
        return launched

    def _hand_over(self, launched: Launched) -> None:
        if not self._on_gpu:
            return
        # In the step's own stream: the next step can't overwrite the tokens, and the copy takes microseconds.
        self._results.append(self._results.pop(0))
        host = self._results[0][: len(launched.work)]
        launched.tokens = host.copy_(launched.tokens[: len(launched.work)], non_blocking=True)
        launched.copied = torch.cuda.Event()
        launched.copied.record()


class Shape(NamedTuple):
    """A step of `sequences` equal pieces of work, each `tokens` after the first `start`. Those that warm up a model:
    decode steps of one sequence to all; prompts short and long, one and many. Between them they take every way in which
    the kernels cut up their work: that depends on the numbers of tokens and sequences only."""

    sequences: int
    start: int
    tokens: int


def warm_up_shapes(options: EngineOptions) -> list[Shape]:
    """What a first request is likely to need comes first."""
    sizes = sorted({min(1 << bits, options.max_seqs) for bits in range(options.max_seqs.bit_length() + 1)})
    lone = [Shape(1, 0, count) for count in prompt_sizes(options)]
    decode = [Shape(size, options.max_model_len - 1, 1) for size in sizes]
    many = ((min(options.max_seqs, options.token_budget // count), count) for count in prompt_sizes(options))
    rest = [*lone[::2], *decode[1:], *(Shape(sequences, 0, count) for sequences, count in many)]
    return [lone[1], decode[0], *rest]


def prompt_sizes(options: EngineOptions) -> list[int]:
    return [min(size, options.max_model_len, options.token_budget) for size in PROMPT_SIZES]


def samples_of(weights: ModelWeights, windows: Seq[int]) -> ModelWeights:
    """So many of the first layers that every kind of attention is among those before the last, which computes less."""
    kinds = 1 + max(windows.index(window) for window in windows)
    return replace(weights, layers=weights.layers[: kinds + 1], arrival=Arrival(0))


def outcome(token: int) -> Outcome:
    return Outcome(token) if token >= 0 else Outcome(-1, NON_FINITE)


def allocate_kv(config: ModelConfig, options: EngineOptions, size: KVSize) -> torch.Tensor:
    """Zeros [N, layers, 2, 16, Hkv, D]; block 0 is the null block."""
    shape = (size.num_blocks + 1, config.num_layers, 2, BLOCK_TOKENS, config.num_kv_heads, config.head_dim)
    if options.device != "cpu":
        return torch.zeros(shape, dtype=options.torch_dtype, device=options.device)
    # Zero pages come from the kernel as they are used, so that a start doesn't pay for touching all of them.
    return torch.from_numpy(np.zeros(size.total_bytes, np.uint8)).view(options.torch_dtype).view(shape)
