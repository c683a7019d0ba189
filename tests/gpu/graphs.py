"""Engines whose steps are all replayed."""

from stoker.runtime.engine.engine import Engine
from stoker.runtime.engine.request import GenerationRequest, SamplingParams


def captured(one: Engine) -> Engine:
    """The same engine; every step within its buckets is a replayed graph now."""
    one.runner.warm_up()
    one.generate([GenerationRequest("first", [1], SamplingParams(1))])
    while one.prepare_idle():
        pass
    assert one.stats()["graphs"] == len(one.runner.graphs.choices)
    return one
