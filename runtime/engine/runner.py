"""The device half of a step: prepare, forward, sample. Owns the KV cache and all else that lives on the device."""

from array import array
from collections.abc import Sequence as Seq
from itertools import product

import numpy as np
import torch
from stoker.kernels import ops
from stoker.runtime.engine import model
from stoker.runtime.engine.batch import Batch, prepare
from stoker.runtime.engine.config import ModelConfig
from stoker.runtime.engine.options import EngineOptions
from stoker.runtime.engine.prefix import BLOCK_TOKENS
from stoker.runtime.engine.request import GenerationRequest, SamplingParams
from stoker.runtime.engine.rope import cos_sin
from stoker.runtime.engine.scheduler import Outcome, Work
from stoker.runtime.engine.sequence import Sequence, blocks_for
from stoker.runtime.engine.sizing import KVSize
from stoker.runtime.engine.weights import ModelWeights

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
        """Runs every kind of step once, on the null block, so that no kernel is compiled for a request's sake."""
        if self._options.device != "cuda":
            return
        last = min(self._options.max_model_len, self._options.token_budget) - 1
        for (start, count), seqs, params in product(
            [(0, 1), (last, 1), (0, min(17, last)), (0, last)], [1, self._options.max_seqs], WARM_UP_PARAMS
        ):
            if seqs * count <= self._options.token_budget:
                self.run([dummy_work(start, count, params)] * seqs)

    def _sample(self, batch: Batch, hidden: torch.Tensor) -> torch.Tensor:
        if not batch.sampled.numel():
            return batch.sampled
        scores = model.logits(self.weights, hidden[batch.sampled])
        return ops.sample(scores, batch.temperature, batch.top_k, batch.top_p, batch.min_p, batch.seed, batch.position)


WARM_UP_PARAMS = [
    SamplingParams(max_tokens=1, temperature=0.0),
    SamplingParams(max_tokens=1),
    SamplingParams(max_tokens=1, top_k=5, top_p=0.9, min_p=0.01),
]


def dummy_work(start: int, count: int, params: SamplingParams) -> Work:
    request = GenerationRequest(id="", prompt=[0] * (start + count), params=params)
    sequence = Sequence.of(request, arrival=0, root=b"", eos=())
    sequence.blocks = array("i", [0] * blocks_for(start + count))
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
