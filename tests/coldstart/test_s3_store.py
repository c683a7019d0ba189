"""Ranged reads against an endpoint that breaks its promises, one at a time."""

import gc
import threading
import time
from typing import Any

import pytest
from boto3.s3.transfer import TransferConfig

from stoker.coldstart.failures import (
    ColdStartError,
    FetchCancelled,
    ObjectChanged,
    ObjectMissing,
    ObjectTruncated,
    StoreUnavailable,
)
from stoker.coldstart.http_connection import Patience
from stoker.coldstart.s3_store import S3Store
from stoker.coldstart.store import ReadWatch, open_store

BODY = bytes(range(256)) * 2000


@pytest.fixture
def store(fault_server) -> S3Store:
    fault_server.objects["x"], fault_server.etags["x"] = BODY, '"one"'
    return S3Store("models", retry_budget_s=1)


def read(store: S3Store, offset: int = 100, length: int = 200_000, etag: str = "", watch: Any = None) -> bytes:
    data = bytearray(length)
    store.read_range("x", offset, memoryview(data), etag, watch)
    return bytes(data)


@pytest.mark.parametrize(
    "faults",
    [
        ["503", "429", "500"],
        ["reset"],
        ["hang_up", "hang_up"],
        ["truncate", "truncate", "truncate"],
        ["nothing"],
        ["expired"],
        ["drip"],
        ["goodbye", "right", "goodbye"],
    ],
    ids="-".join,
)
def test_passing_faults_cost_only_time(store: S3Store, fault_server, faults: list[str]):
    fault_server.faults.extend(faults)
    watch = ReadWatch()
    store._retry_budget_s = 10
    assert read(store, watch=watch) == BODY[100:200_100]
    assert read(store, 5, 10) == BODY[5:15]
    harmless = ("drip", "goodbye", "right")
    assert watch.retries >= sum(fault not in (*harmless, "hang_up") for fault in faults)


def test_a_retry_continues_where_the_body_ended(store: S3Store, fault_server):
    fault_server.faults.extend(["truncate"])
    assert read(store, 0, 1000) == BODY[:1000]
    assert [value for _, value in fault_server.ranges] == ["bytes=0-999", "bytes=500-999"]


@pytest.mark.parametrize(
    ("fault", "kind", "message"),
    [
        ("404", ObjectMissing, "HTTP 404 NoSuchKey"),
        ("403", StoreUnavailable, "HTTP 403 AccessDenied"),
        ("412", ObjectChanged, "HTTP 412 PreconditionFailed"),
        ("whole", StoreUnavailable, "ignored the byte range"),
        ("wrong_range", StoreUnavailable, "Content-Range is 'bytes 1-"),
        ("short_length", ObjectTruncated, "announces 199999 bytes"),
        ("gzip", StoreUnavailable, "Content-Encoding gzip"),
        ("other_etag", ObjectChanged, 'ETag is "other", not "one"'),
    ],
)
def test_final_answers_are_not_asked_again(
    store: S3Store, fault_server, fault: str, kind: type[ColdStartError], message: str
):
    fault_server.always = fault
    with pytest.raises(kind, match=message) as caught:
        read(store, etag='"one"')
    assert type(caught.value) is kind and len(fault_server.ranges) == 1
    assert caught.value.object == "s3://models/x" and caught.value.range == (100, 200_100)


@pytest.mark.parametrize(
    ("fault", "kind", "message"),
    [
        ("503", StoreUnavailable, "HTTP 503 SlowDown"),
        ("429", StoreUnavailable, "HTTP 429"),
        ("expired", StoreUnavailable, "HTTP 403 ExpiredToken"),
        ("hang_up", StoreUnavailable, "RemoteDisconnected"),
        ("nothing", ObjectTruncated, "body ended after 0 of 200000 bytes"),
    ],
)
def test_lasting_faults_end_with_the_budget(
    store: S3Store, fault_server, fault: str, kind: type[ColdStartError], message: str
):
    fault_server.always = fault
    start = time.monotonic()
    with pytest.raises(kind, match=message) as caught:
        read(store)
    assert "attempt" in str(caught.value) and len(fault_server.ranges) > 2
    assert time.monotonic() - start < 5


def test_errors_say_how_the_store_was_reached_and_keep_the_secret(store: S3Store, fault_server):
    fault_server.always = "403"
    with pytest.raises(StoreUnavailable) as caught:
        read(store)
    text = str(caught.value)
    for part in ("HTTP 403", "AccessDenied", "req-7", fault_server.server_address[0], "path-style", "credentials: env"):
        assert part in text
    assert "test-secret-value" not in text and "Signature" not in text


def test_control_call_errors_say_the_same(store: S3Store, fault_server):
    with pytest.raises(ObjectMissing, match="HTTP 404 .*path-style addressing, credentials: env"):
        store.stat("nothing")


def test_an_endpoint_that_is_not_there(point_at):
    point_at("http://127.0.0.1:1")
    store = S3Store("models", retry_budget_s=0.2)
    with pytest.raises(StoreUnavailable, match="ConnectionRefusedError.*endpoint http://127.0.0.1:1"):
        read(store)


def test_connections_are_kept_and_a_stale_one_replaced(store: S3Store, fault_server):
    for offset in range(5):
        read(store, offset, 10)
    assert fault_server.connections == 1
    for connection in store._idle:
        connection._socket.shutdown(2)
    watch = ReadWatch()
    assert read(store, 7, 10, watch=watch) == BODY[7:17]
    assert (fault_server.connections, watch.retries) == (2, 0)


def test_if_match_is_sent_only_when_the_version_is_known(store: S3Store, fault_server):
    read(store, 0, 10)
    read(store, 0, 10, etag='"one"')
    assert [headers.get("if-match") for headers in fault_server.headers] == [None, '"one"']


@pytest.mark.parametrize("fault", ["stall", "silence"])
def test_a_stuck_read_can_be_cancelled(store: S3Store, fault_server, fault: str):
    fault_server.always = fault
    watch = ReadWatch()
    threading.Timer(0.2, watch.stop.set).start()
    start = time.monotonic()
    with pytest.raises(FetchCancelled):
        read(store, watch=watch)
    assert time.monotonic() - start < 3


def test_a_stalled_body_is_given_up_and_continued(store: S3Store, fault_server):
    store._patience = Patience(stall_s=1)
    fault_server.faults.append("stall")
    watch = ReadWatch()
    assert read(store, watch=watch) == BODY[100:200_100]
    assert watch.retries == 1


def test_without_credentials_requests_are_unsigned(fault_server, monkeypatch: pytest.MonkeyPatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    fault_server.objects["x"], fault_server.etags["x"] = BODY, '"one"'
    store = S3Store("models")
    assert read(store, 0, 10) == BODY[:10] and store.read("x") == BODY
    assert "authorization" not in fault_server.headers[0]
    assert "Signature" not in store._signed_url("x")
    fault_server.always = "403"
    with pytest.raises(StoreUnavailable, match="none .unsigned requests."):
        read(store)


def test_ranges_over_tls(tls_server):
    tls_server.objects["x"], tls_server.etags["x"] = BODY, '"one"'
    store = S3Store("models", retry_budget_s=5)
    tls_server.faults.extend(["right", "truncate", "drip", "503"])
    for offset in range(4):
        assert read(store, offset, 200_000) == BODY[offset : offset + 200_000]


def test_a_stuck_tls_read_can_be_cancelled(tls_server):
    tls_server.objects["x"], tls_server.etags["x"] = BODY, '"one"'
    tls_server.always = "stall"
    watch = ReadWatch()
    threading.Timer(0.2, watch.stop.set).start()
    start = time.monotonic()
    with pytest.raises(FetchCancelled):
        read(S3Store("models"), watch=watch)
    assert time.monotonic() - start < 3


def test_an_untrusted_certificate_is_refused(tls_server, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("AWS_CA_BUNDLE")
    with pytest.raises(StoreUnavailable, match="certificate verify failed"):
        read(S3Store("models", retry_budget_s=600))


def test_many_threads_share_one_store(store: S3Store, fault_server):
    store._retry_budget_s = 10
    fault_server.faults.extend(["503", "truncate", "reset"] * 4)
    wrong: list[int] = []

    def work(number: int) -> None:
        offsets = range(number * 1000, 60_000, 8000)
        wrong.extend(offset for offset in offsets if read(store, offset, 5000) != BODY[offset : offset + 5000])

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_dropped_store_closes_its_connections(fault_server):
    fault_server.objects["x"], fault_server.etags["x"] = BODY, '"one"'
    store = open_store("s3://models")
    store.read_range("x", 0, memoryview(bytearray(10)))
    idle = store._idle  # type: ignore[attr-defined]
    assert len(idle) == 1
    del store
    gc.collect()
    assert all(connection._socket is None for connection in idle)


def test_large_files_go_up_in_parts(s3_endpoint: str, tmp_path, monkeypatch: pytest.MonkeyPatch):
    part = TransferConfig(multipart_threshold=5 << 20, multipart_chunksize=5 << 20)
    monkeypatch.setattr("stoker.coldstart.s3_store.MULTIPART", part)
    source = tmp_path / "big"
    source.write_bytes(BODY * 15)
    store = S3Store("models", "parts")
    written = store.write("big", source)
    assert written.size == len(BODY) * 15 and written.etag.endswith('-2"')
    assert store.read("big") == BODY * 15
