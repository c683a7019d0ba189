"""Waiting for the stages of a load, on a CPU: copies are complete when they are issued."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from stoker.coldstart.arrival import Arrival
from stoker.coldstart.failures import ObjectTruncated
from stoker.coldstart.upload import Uploader


def test_a_stage_is_waited_for_until_it_is_issued():
    arrival = Arrival(2)
    with ThreadPoolExecutor(1) as pool:
        arrival.issued(0, None)
        arrival.wait(0)
        waiting = pool.submit(arrival.wait, 1)
        assert not waiting.done()
        arrival.issued(1, None)
        assert waiting.result(10) is None


def test_whoever_waits_gets_the_error_of_the_load():
    arrival = Arrival(2)
    arrival.issued(0, None)
    begun = threading.Event()

    def wait() -> None:
        begun.set()
        arrival.wait(1)

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(wait)
        begun.wait(10)
        arrival.fail(ObjectTruncated("x", None, "first"))
        arrival.fail(ObjectTruncated("x", None, "second"))
        with pytest.raises(ObjectTruncated, match="first"):
            waiting.result(10)
    with pytest.raises(ObjectTruncated):
        arrival.wait(0)


def test_after_the_end_nothing_is_waited_for():
    arrival = Arrival(3)
    arrival.finish()
    for stage in range(3):
        arrival.wait(stage)
    assert Arrival(0).done and not Arrival(1).done


def test_stages_are_issued_with_the_last_of_their_chunks(published):
    """Also those that no tensor belongs to."""
    stages = {"model.embed_tokens.weight": 0, "model.layers.0.mlp.weight": 1, "model.layers.1.mlp.weight": 2}
    arrival = Arrival(5)
    uploader = Uploader(published.manifest, published.targets(), arrival, lambda name: stages.get(name, 4))
    arrival.wait(3)
    seen: list[tuple[int, int]] = []
    issued = arrival.issued

    def note(stage: int, event: torch.cuda.Event | None) -> None:
        seen.append((stage, placed))
        issued(stage, event)

    arrival.issued = note  # type: ignore[method-assign]
    manifest = published.manifest
    for placed, chunk in enumerate(manifest.chunks):
        data = bytearray(chunk.length)
        published.store.read_range(manifest.files[chunk.file].name, chunk.offset, memoryview(data))
        uploader.place(placed, memoryview(data))
    assert [stage for stage, _ in seen] == [0, 1, 2, 4]
    assert seen[-1][1] == len(manifest.chunks) - 1 and seen[0][1] < seen[-1][1] // 2 + 2
    for stage in range(5):
        arrival.wait(stage)
