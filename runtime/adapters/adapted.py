"""What the adapters of a step's rows add to its products."""

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import NamedTuple

import torch

from stoker.kernels import ops
from stoker.runtime.adapters.slot_memory import Matrices, Site
from stoker.runtime.engine.state import Batch


class Adapted:
    """`slots` i32[S] are those of the step's sequences, 0 for none."""

    def __init__(self, layers: Seq[Mapping[Site, Matrices]], batch: Batch, slots: torch.Tensor) -> None:
        self._layers = layers
        self.of_sequences = slots
        self.of_tokens = slots if batch.one_each else slots[owners(batch)]

    def layer(self, index: int) -> "AdaptedLayer":
        return AdaptedLayer(self, self._layers[index])


class AdaptedLayer(NamedTuple):
    step: Adapted
    matrices: Mapping[Site, Matrices]

    def add(self, site: Site, product: torch.Tensor, x: torch.Tensor) -> None:
        """To `product` of `x`, in place; rows are the step's tokens, or its sequences' last ones alone."""
        a, b, first = self.matrices[site]
        slots = self.step.of_tokens if len(x) == len(self.step.of_tokens) else self.step.of_sequences
        ops.add_lora(product, x, a, b, slots, first)


def owners(batch: Batch) -> torch.Tensor:
    """Which sequence each token belongs to; padding acts as the last one's."""
    index = torch.arange(batch.ids.numel(), dtype=torch.int32, device=batch.ids.device)
    found = torch.searchsorted(batch.query_start[1:].contiguous(), index, right=True)
    return found.clamp_(max=batch.rows.numel() - 1)
