from pathlib import Path

import pytest

from stoker.coldstart.failures import ObjectAltered, ObjectMissing, StoreUnavailable
from stoker.coldstart.store import ObjectStore, open_store
from stoker.queue.records import pack
from stoker.runtime import payloads

JOB = "f-1-01M8PH3EBGX2J2PYZ4QGJSS614"
BIG = pack("x" * payloads.INLINE_LIMIT)


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    return open_store((tmp_path / "store").as_uri())


def test_small_ones_stay_in_the_queue(store: ObjectStore) -> None:
    payload = b"\x01" * payloads.INLINE_LIMIT
    assert payloads.put(store, JOB, payload) is payload
    assert payloads.get(store, JOB, payload) is payload
    assert list(store.list()) == []


def test_big_ones_come_back_whole(store: ObjectStore) -> None:
    reference = payloads.put(store, JOB, BIG)
    assert payloads.is_reference(reference) and not payloads.is_reference(BIG)
    assert len(reference) < 100
    assert payloads.get(store, JOB, reference) == BIG
    assert [payloads.job_of(found.key) for found in store.list(payloads.PREFIX)] == [JOB]


def test_missing_altered_and_short_ones_are_told(store: ObjectStore) -> None:
    reference, key = payloads.put(store, JOB, BIG), payloads.object_key(JOB)
    for damaged in (BIG[:-1], BIG[:-1] + b"y", b""):
        store.write(key, damaged)
        with pytest.raises(ObjectAltered, match=JOB):
            payloads.get(store, JOB, reference)
    store.delete(key)
    with pytest.raises(ObjectMissing):
        payloads.get(store, JOB, reference)


def test_a_store_that_takes_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StoreUnavailable):
        payloads.put(open_store((tmp_path / "file").as_uri()), JOB, BIG)


@pytest.mark.parametrize("key", ["payloads/f/x", f"payloads/g/{JOB}", f"other/f-1/{JOB}", JOB, f"payloads/f-1/a/{JOB}"])
def test_other_objects_are_no_payloads(key: str) -> None:
    assert payloads.job_of(key) is None


def test_each_attempt_has_its_own_result(store: ObjectStore) -> None:
    first, second = (payloads.put_result(store, JOB, fence, BIG + bytes([fence])) for fence in (7, 8))
    assert payloads.is_reference(first) and len(first) < 100
    assert payloads.get_result(store, JOB, first) == BIG + b"\x07"
    assert payloads.get_result(store, JOB, second) == BIG + b"\x08"
    assert [payloads.job_of(found.key) for found in store.list(payloads.RESULTS)] == [JOB, JOB]
    assert payloads.put_result(store, JOB, 9, b"small") == b"small" == payloads.get_result(store, JOB, b"small")
    store.write(payloads.result_key(JOB, 7), BIG)
    with pytest.raises(ObjectAltered, match=JOB):
        payloads.get_result(store, JOB, first)
    store.delete(payloads.result_key(JOB, 8))
    with pytest.raises(ObjectMissing):
        payloads.get_result(store, JOB, second)


@pytest.mark.parametrize(
    "key", [f"results/f-1/{JOB}", f"results/f-1/{JOB}.x", f"results/g/{JOB}.7", f"payloads/f-1/{JOB}.7"]
)
def test_other_objects_are_no_results(key: str) -> None:
    assert payloads.job_of(key) is None
