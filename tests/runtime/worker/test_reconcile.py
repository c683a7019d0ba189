from stoker.runtime.worker.reconcile import compare

RECORD = {"spec": {}, "device": "cpu"}


def test_starts_what_is_missing_and_stops_what_is_not_wanted() -> None:
    change = compare({"a": RECORD, "b": RECORD}, {"b": "ready", "c": "ready"})
    assert list(change.start) == ["a"]
    assert change.stop == ["c"]


def test_what_already_stops_is_left_alone() -> None:
    assert compare({}, {"a": "draining", "b": "gone"}).stop == []


def test_a_failed_replica_that_is_no_longer_wanted_is_removed() -> None:
    assert compare({}, {"a": "failed"}).stop == ["a"]


def test_a_wanted_replica_that_failed_is_not_started_twice() -> None:
    change = compare({"a": RECORD}, {"a": "failed"})
    assert change.start == {} and change.stop == []


def test_a_draining_replica_is_drained_once_and_never_started() -> None:
    draining = {**RECORD, "draining": True}
    assert compare({"a": draining}, {"a": "ready"}).drain == ["a"]
    for present in ({}, {"a": "draining"}, {"a": "gone"}):
        change = compare({"a": draining}, present)
        assert (change.start, change.stop, change.drain) == ({}, [], [])
