"""What every object store must do, against a folder and against a real S3 server."""

from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from stoker.coldstart.failures import ObjectChanged, ObjectMissing, ObjectTruncated
from stoker.coldstart.file_store import FileStore
from stoker.coldstart.s3_store import S3Store
from stoker.coldstart.store import ObjectStore, checked_key, open_store

BODY = bytes(range(256)) * 40


@pytest.fixture(params=["file", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ObjectStore]:
    if request.param == "file":
        yield open_store((tmp_path / "a folder").as_uri())
    else:
        request.getfixturevalue("s3_endpoint")
        yield open_store(f"s3://models/{uuid4().hex}/deep")


def read_part(store: ObjectStore, key: str, offset: int, length: int, etag: str = "") -> bytes:
    data = bytearray(length)
    store.read_range(key, offset, memoryview(data), etag)
    return bytes(data)


def test_write_stat_read(store: ObjectStore):
    written = store.write("a/b c+d.bin", BODY)
    assert written.key == "a/b c+d.bin" and written.size == len(BODY) and written.etag
    assert store.stat("a/b c+d.bin") == written
    assert store.read("a/b c+d.bin") == BODY
    assert read_part(store, "a/b c+d.bin", 300, 700, written.etag) == BODY[300:1000]
    assert read_part(store, "a/b c+d.bin", len(BODY), 0) == b""


def test_write_from_a_file_and_overwrite(store: ObjectStore, tmp_path: Path):
    first = store.write("x", b"first")
    (tmp_path / "source").write_bytes(BODY)
    second = store.write("x", tmp_path / "source")
    assert store.read("x") == BODY and second.size == len(BODY) and second.etag != first.etag


def test_list_and_delete(store: ObjectStore):
    assert list(store.list()) == []
    written = [store.write(key, b"1") for key in ("a/1", "a/2", "ab", "b")]
    assert list(store.list()) == written
    assert [info.key for info in store.list("a")] == ["a/1", "a/2", "ab"]
    assert [info.key for info in store.list("a/")] == ["a/1", "a/2"]
    store.delete("a/1")
    store.delete("a/1")
    assert [info.key for info in store.list()] == ["a/2", "ab", "b"]


def test_missing_objects_are_named(store: ObjectStore):
    for call in (store.stat, store.read, lambda key: read_part(store, key, 0, 4)):
        with pytest.raises(ObjectMissing, match="no/such.bin") as caught:
            call("no/such.bin")
        assert caught.value.object == f"{store.url}/no/such.bin"


def test_a_range_past_the_end_is_truncation(store: ObjectStore):
    store.write("x", BODY)
    for offset in (len(BODY) - 4, len(BODY) + 10):
        with pytest.raises(ObjectTruncated) as caught:
            read_part(store, "x", offset, 8)
        assert caught.value.range == (offset, offset + 8)


def test_a_replaced_object_is_noticed(store: ObjectStore):
    old = store.write("x", BODY)
    store.write("x", BODY[::-1])
    with pytest.raises(ObjectChanged):
        read_part(store, "x", 0, 8, old.etag)


@pytest.mark.parametrize("key", ["", "/etc/passwd", "../x", "a/../../x", "a//b", "a/./b", "a\0b"])
def test_keys_stay_inside_the_store(tmp_path: Path, key: str):
    store = FileStore(tmp_path)
    for call in (store.stat, store.read, store.delete, lambda key: store.write(key, b"")):
        with pytest.raises(ValueError, match="relative path"):
            call(key)


def test_ordinary_keys_are_accepted():
    assert checked_key("a/..b/c d") == "a/..b/c d"


def test_open_store_reads_urls(tmp_path: Path, point_at):
    point_at("http://127.0.0.1:9")
    assert isinstance(open_store(tmp_path.as_uri()), FileStore)
    spaced = open_store("file:///a%20b/c")
    assert isinstance(spaced, FileStore) and spaced.folder == Path("/a b/c") and spaced.url == "file:///a%20b/c"
    remote = open_store("s3://bucket/some/prefix/")
    assert isinstance(remote, S3Store) and (remote.bucket, remote.url) == ("bucket", "s3://bucket/some/prefix")
    assert open_store("s3://bucket").url == "s3://bucket"


@pytest.mark.parametrize(
    "url", ["", "models", "/abs/path", "http://x/y", "file://relative/x", "s3://", "s3:///x", "s3://b/x?versionId=1"]
)
def test_other_urls_are_refused_with_the_accepted_forms(url: str):
    with pytest.raises(ValueError, match="file:///absolute/folder or s3://bucket/prefix"):
        open_store(url)
