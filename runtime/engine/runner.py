"""The device half of a step: prepare, forward, sample. Owns the KV cache and all else that lives on the device."""

from array import array
from collections.abc import Sequence as Seq
from typing import NamedTuple

import numpy as np
import torch

from stoker.kernels import ops
from stoker.runtime.engine import model
from stoker.runtime.engine.batch import Batch, prepare
from stoker.runtime.engine.blocks import NULL_BLOCK
from stoker.runtime.engine.config import ModelConfig
from stoker.runtime.engine.options import EngineOptions
from stoker.runtime.engine.prefix import BLOCK_TOKENS
from stoker.runtime.engine.request import GenerationRequest, SamplingParams
from stoker.runtime.engine.rope import cos_sin
from stoker.runtime.engine.scheduler import Outcome, Work
from stoker.runtime.engine.sequence import Sequence, blocks_for
from stoker.runtime.engine.sizing import KVSize
from stoker.runtime.engine.weights import ModelWeights

SHORT_PROMPT, LONG_PROMPT = 17, 4096
NON_FINITE = "the model produced non-finite values (NaN or infinity) for this request"


class Runner:
    """`options` are resolved."""

    def __init__(self, config: ModelConfig, options: EngineOptions, weights: ModelWeights, size: KVSize) -> None:
        self._config = config
        self._options = options
        self.weights = weights
        self.kv = allocate_kv(config, options, size)
        self.cos_sin = cos_sin(config.rope, config.head_dim, options.max_model_len, options.device)

    @torch.inference_mode()
    def run(self, work: Seq[Work]) -> list[Outcome]:
        """Computes one step. May be called again with the same work: it writes the same values to the same places."""
        batch = prepare(work, self._options.device)
        hidden = model.forward(self._config, self.weights, self.cos_sin, self.kv, batch)
        tokens = self._sample(batch, hidden)
        finite = hidden.isfinite().all(-1)
        return collect(work, torch.cat((finite.long(), tokens)).tolist())

    def warm_up(self) -> None:
        """Runs every kind of step once on a GPU, so that no kernel is ever compiled while a request waits for it."""
        if self._options.device == "cuda":
            for shape in warm_up_shapes(self._options):
                self.run([dummy_work(shape.start, shape.tokens)] * shape.sequences)
            self.kv[NULL_BLOCK].zero_()

    def _sample(self, batch: Batch, hidden: torch.Tensor) -> torch.Tensor:
        if not batch.sampled.numel():
            return batch.sampled
        scores = model.logits(self.weights, hidden[batch.sampled])
        return ops.sample(scores, batch.temperature, batch.top_k, batch.top_p, batch.min_p, batch.seed, batch.position)


class Shape(NamedTuple):
    """A step of `sequences` equal pieces of work, each `tokens` after the first `start`."""

    sequences: int
    start: int
    tokens: int


def warm_up_shapes(options: EngineOptions) -> list[Shape]:
    """Decode steps from short to long contexts, for one sequence and for all; prompts short and long, one and many.
    Between them they take every way in which the kernels cut up their work."""
    longest = options.max_model_len
    contexts = [1 << bits for bits in range(longest.bit_length())] + [longest]
    prompts = [min(size, longest, options.token_budget) for size in (SHORT_PROMPT, LONG_PROMPT)]
    decode = [Shape(1, context - 1, 1) for context in contexts] + [Shape(options.max_seqs, longest - 1, 1)]
    one = [Shape(1, 0, count) for count in prompts]
    many = [Shape(min(options.max_seqs, options.token_budget // count), 0, count) for count in prompts]
    return decode + one + many


def dummy_work(start: int, count: int) -> Work:
    """On the null block, whose content never matters."""
    params = SamplingParams(max_tokens=1, top_k=5, top_p=0.9, min_p=0.01)
    request = GenerationRequest(id="", prompt=[0] * (start + count), params=params)
    sequence = Sequence.of(request, arrival=0, root=b"", eos=())
    sequence.blocks = array("i", [NULL_BLOCK] * blocks_for(start + count))
    return Work(sequence, start, count, samples=True)


def collect(work: Seq[Work], values: list[int]) -> list[Outcome]:
    """`values`: a finite flag per sequence, then a token (-1: non-finite logits) per sequence that samples."""
    finite, tokens = values[: len(work)], iter(values[len(work) :])
    return [
        outcome(is_finite, next(tokens) if item.samples else 0) for item, is_finite in zip(work, finite, strict=True)
    ]


def outcome(is_finite: int, token: int) -> Outcome:
    return Outcome(token) if is_finite and token >= 0 else Outcome(-1, NON_FINITE)


def allocate_kv(config: ModelConfig, options: EngineOptions, size: KVSize) -> torch.Tensor:
    """Zeros [N, layers, 2, 16, Hkv, D]; block 0 is the null block."""
    shape = (size.num_blocks + 1, config.num_layers, 2, BLOCK_TOKENS, config.num_kv_heads, config.head_dim)
    if options.device != "cpu":
        return torch.zeros(shape, dtype=options.torch_dtype, device=options.device)
    # Zero pages come from the kernel as they are used, so that a start doesn't pay for touching all of them.
    return torch.from_numpy(np.zeros(size.total_bytes, np.uint8)).view(options.torch_dtype).view(shape)
