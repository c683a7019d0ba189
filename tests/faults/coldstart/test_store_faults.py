"""A store that breaks its promises in the middle of a load: the right weights, or a typed error that names object,
range and reason. Never a hang, never wrong bytes."""

import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from stoker.coldstart import fetch_board, pace
from stoker.coldstart.failures import (
    ColdStartError,
    ObjectAltered,
    ObjectChanged,
    ObjectMissing,
    ObjectTruncated,
    StoreUnavailable,
)
from stoker.coldstart.http_connection import Patience
from stoker.coldstart.pace import Progress, slowest
from tests.coldstart.conftest import Published
from tests.coldstart.fetching import expected, fetch_all, fetch_and_report

GOOD_RANGES = 5


@pytest.mark.parametrize(
    "faults",
    [
        ["truncate"] * 4,
        ["nothing"] * 3,
        ["flip"],
        ["503"] * 8,
        ["500", "503", "429"] * 3,
        ["reset"] * 10,
        ["hang_up"] * 6,
        ["expired"] * 4,
        ["drip", "goodbye", "reset", "truncate", "503", "nothing", "expired"],
    ],
    ids=lambda faults: f"{len(faults)}-{faults[0]}",
)
def test_what_passes_costs_only_time(fault_server: Any, published: Any, faults: list[str]) -> None:
    store = published.serve(fault_server, retry_budget_s=30)
    fault_server.faults.extend(["right"] * GOOD_RANGES + faults)
    assert fetch_all(store, published) == expected(published)
    assert not fault_server.faults


@pytest.mark.parametrize(
    ("fault", "kinds", "reason"),
    [
        ("truncate", (ObjectTruncated,), "the body ended after"),
        ("nothing", (ObjectTruncated,), "the body ended after 0 of"),
        ("short_length", (ObjectTruncated,), "announces"),
        ("wrong_range", (StoreUnavailable,), "Content-Range is"),
        ("whole", (StoreUnavailable,), "ignored the byte range"),
        ("gzip", (StoreUnavailable,), "Content-Encoding gzip"),
        ("other_etag", (ObjectChanged,), "ETag is"),
        ("412", (ObjectChanged,), "PreconditionFailed"),
        ("flip", (ObjectAltered,), "checksum isn't the published"),
        ("404", (ObjectMissing,), "NoSuchKey"),
        ("403", (StoreUnavailable,), "AccessDenied"),
        ("503", (StoreUnavailable,), "SlowDown"),
        ("429", (StoreUnavailable,), "TooManyRequests"),
        ("expired", (StoreUnavailable,), "ExpiredToken"),
        ("reset", (StoreUnavailable, ObjectTruncated), "attempt"),
        ("hang_up", (StoreUnavailable,), "RemoteDisconnected"),
        ("silence", (StoreUnavailable,), "Stalled"),
    ],
)
def test_what_lasts_is_a_typed_error(
    fault_server: Any, published: Any, fault: str, kinds: tuple[type[ColdStartError], ...], reason: str
) -> None:
    store = published.serve(fault_server, retry_budget_s=0.4)
    store._patience = Patience(first_byte_s=0.5, stall_s=0.5)
    fault_server.faults.extend(["right"] * GOOD_RANGES)
    fault_server.always = fault
    start = time.monotonic()
    with pytest.raises(ColdStartError, match=reason) as caught:
        fetch_all(store, published)
    assert type(caught.value) in kinds
    assert caught.value.object in {f"s3://models/{entry.name}" for entry in published.manifest.files}
    assert caught.value.range and 0 < caught.value.range[1] - caught.value.range[0] <= 4096
    assert time.monotonic() - start < 10


@pytest.mark.parametrize("fault", ["crawl", "silence", "stall"])
def test_one_bad_connection_does_not_set_the_pace(
    fault_server: Any, write_model: Any, tmp_path: Any, fault: str
) -> None:
    """One of the connections gives 10 KB/s, or nothing at all: its 64 KiB alone would take 6.5 s and more."""
    tensors = {"a": torch.randn(1024, 1024)}
    model = Published(write_model(tensors), tmp_path / "big-store", tensors, 1 << 16)
    store = model.serve(fault_server)
    fault_server.faults.extend(["right"] * GOOD_RANGES + [fault])
    start = time.monotonic()
    found, summary = fetch_and_report(store, model.manifest, slots=8, connections=4)
    assert time.monotonic() - start < 4
    assert found == expected(model)
    assert summary["hedges"] == 1 and 0 <= summary["extra_bytes"] <= 1 << 16
    assert fault_server.crawled < 30_000


def test_slow_connections_again_and_again(fault_server: Any, published: Any) -> None:
    """Every sixth request crawls: each is replaced, and what is received twice stays bounded."""
    store = published.serve(fault_server)
    fault_server.faults.extend((["right"] * 5 + ["silence"]) * 4)
    found, summary = fetch_and_report(store, published.manifest, slots=8, connections=4)
    assert found == expected(published)
    assert summary["hedges"] >= 4 and summary["extra_bytes"] <= 4 * 4096


def test_a_storm_of_refusals_makes_fewer_connections(
    fault_server: Any, published: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does it make second requests: on a busy machine a read that was not refused may get one."""
    looked_at: list[Progress] = []
    hedged: list[Progress] = []

    def noted(running: Sequence[Progress], typical: float) -> Progress | None:
        looked_at.extend(running)
        found = slowest(running, typical)
        hedged.extend([found] if found else [])
        return found

    monkeypatch.setattr(fetch_board, "slowest", noted)
    monkeypatch.setattr(pace, "HEDGE_AFTER_S", 0.2)
    store = published.serve(fault_server, retry_budget_s=60)
    fault_server.faults.extend(["503"] * 24)
    found, summary = fetch_and_report(store, published.manifest, slots=16, connections=8)
    assert found == expected(published)
    assert any(read.refused for read in looked_at) and not any(read.refused for read in hedged)
    assert 24 - len(hedged) <= summary["refusals"] <= 24 and summary["hedges"] <= len(hedged)


def test_a_shard_that_vanishes_in_mid_load(fault_server: Any, published: Any) -> None:
    store = published.serve(fault_server)
    shard = published.manifest.files[1].name
    fault_server.on_range = lambda count: fault_server.objects.pop(shard, None) if count == 3 else None
    with pytest.raises(ObjectMissing) as caught:
        fetch_all(store, published)
    assert caught.value.object == f"s3://models/{shard}" and caught.value.range


@pytest.mark.parametrize("bytes_change", [False, True])
def test_a_shard_that_is_replaced_in_mid_load(fault_server: Any, published: Any, bytes_change: bool) -> None:
    store = published.serve(fault_server)
    shard = published.manifest.files[0].name

    def replace(count: int) -> None:
        if count == 6:
            fault_server.etags[shard] = '"new"'
            if bytes_change:
                fault_server.objects[shard] = bytes(len(fault_server.objects[shard]))

    fault_server.on_range = replace
    if not bytes_change:
        assert fetch_all(store, published) == expected(published)
        return
    with pytest.raises(ObjectChanged, match="replaced after it was published") as caught:
        fetch_all(store, published)
    assert caught.value.object == f"s3://models/{shard}" and caught.value.range


def test_over_tls_as_well(tls_server: Any, published: Any) -> None:
    store = published.serve(tls_server, retry_budget_s=30)
    tls_server.faults.extend(["right", "truncate", "reset", "503", "flip", "hang_up", "drip"] * 2)
    assert fetch_all(store, published) == expected(published)
