"""What a request got, to the last bit: tokens, reports and logits."""

import random
from dataclasses import dataclass, field

import torch

from stoker.runtime.engine.engine import Engine
from stoker.runtime.engine.request import GenerationRequest, TokenLogprobs
from stoker.runtime.engine.runner import Launched


@dataclass
class Seen:
    """`logits` of the steps that sampled, for a request that asks for log-probabilities."""

    tokens: list[int] = field(default_factory=list)
    reports: list[TokenLogprobs] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list)


def run(engine: Engine, coming: list[GenerationRequest], rng: random.Random | None = None) -> dict[str, Seen]:
    """All at once, or with `rng` over time. Each has to end well."""
    got = {request.id: Seen() for request in coming}
    watch(engine, got)
    waiting = list(coming)
    while waiting or engine.has_work():
        while waiting and (rng is None or rng.random() < 0.4):
            engine.submit(waiting.pop())
        for delta in engine.step():
            assert delta.finish_reason in (None, "length"), delta
            got[delta.request_id].tokens.extend(delta.tokens)
            got[delta.request_id].reports.extend(delta.logprobs)
    return got


def watch(engine: Engine, got: dict[str, Seen]) -> None:
    """Notes logits before rows are steered."""
    finish = type(engine.runner).finish

    def watching(launched: Launched) -> None:
        if launched.computed:
            logits = launched.computed.logits.cpu().clone()
            for place, item in enumerate(launched.work):
                if item.samples and item.sequence.params.logprobs is not None:
                    got[item.sequence.id].logits.append(logits[place])
        finish(engine.runner, launched)

    engine.runner.finish = watching  # type: ignore[method-assign]


def check_same(got: dict[str, Seen], expected: dict[str, Seen]) -> None:
    for name, seen in got.items():
        own = expected[name]
        assert seen.tokens == own.tokens, name
        assert seen.reports == own.reports, name
        assert len(seen.logits) == len(own.logits) and all(map(torch.equal, seen.logits, own.logits)), name
        assert len(seen.logits) in (0, len(seen.tokens)), name
