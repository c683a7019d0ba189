"""A host's copies of adapters from a bucket, and what a replica makes of them."""

import asyncio
import os
import time
from pathlib import Path
from typing import Any

import pytest

from stoker.coldstart.failures import ObjectAltered, ObjectChanged, ObjectMissing, StoreUnavailable
from stoker.coldstart.s3_store import S3Store
from stoker.runtime.adapters.adapter_file import AdapterFile, read
from stoker.runtime.adapters.shelf import IN_USE_S, AdapterShelf
from stoker.runtime.publishing import push_model
from stoker.runtime.worker.own_adapters import OwnAdapters
from tests.runtime.adapters.folders import file_of, random_folder
from tests.runtime.engine.conftest import TINY

pytestmark = pytest.mark.usefixtures("s3_endpoint")


def pushed(tmp_path: Path, name: str, seed: int = 0) -> tuple[str, Path]:
    """A URL of its own for each test, and the folder."""
    url, folder = f"s3://models/{tmp_path.name}/{name}", random_folder(tmp_path / name, TINY, seed)
    push_model(folder, url)
    return url, folder


def store_of(url: str) -> S3Store:
    return S3Store("models", url.removeprefix("s3://models/"))


def copies(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "shelf").iterdir())


def test_what_is_found_is_what_was_published_and_comes_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shelf = AdapterShelf(tmp_path / "shelf", 1 << 30)
    url, folder = pushed(tmp_path, "a")
    reads: list[int] = []
    ranged = S3Store.read_range
    monkeypatch.setattr(S3Store, "read_range", lambda self, *args: (reads.append(1), ranged(self, *args))[1])
    found = [AdapterFile.from_dict(shelf.fetch(url)) for _ in range(3)]
    assert len(reads) == 1 and len(set(found)) == 1
    assert read(found[0]).keys() == read(file_of(folder)).keys() and found[0].config == file_of(folder).config
    assert AdapterFile.from_dict(AdapterShelf(tmp_path / "shelf", 1 << 30).fetch(url)) == found[0]
    assert len(reads) == 1, "another life of the agent finds the copy"


def test_a_local_folder_is_not_copied(tmp_path: Path) -> None:
    push_model(random_folder(tmp_path / "a", TINY, 0), (tmp_path / "store").as_uri())
    found = AdapterShelf(tmp_path / "shelf", 1 << 30).fetch((tmp_path / "store").as_uri())
    assert Path(found["path"]) == tmp_path / "store" / "adapter_model.safetensors" and not (tmp_path / "shelf").exists()


def test_nothing_wrong_is_kept(tmp_path: Path) -> None:
    shelf = AdapterShelf(tmp_path / "shelf", 1 << 30)
    url, _ = pushed(tmp_path, "a")
    data = bytearray(store_of(url).read("adapter_model.safetensors"))
    data[-1] ^= 1
    store_of(url).write("adapter_model.safetensors", bytes(data))
    with pytest.raises((ObjectAltered, ObjectChanged)):
        shelf.fetch(url)
    assert copies(tmp_path) == []


def test_a_copy_that_the_disk_damaged_is_fetched_again(tmp_path: Path) -> None:
    url, _ = pushed(tmp_path, "a")
    found = AdapterShelf(tmp_path / "shelf", 1 << 30).fetch(url)
    (copy,) = copies(tmp_path)
    copy.write_bytes(b"x" * copy.stat().st_size)
    assert AdapterShelf(tmp_path / "shelf", 1 << 30).fetch(url) == found
    read(AdapterFile.from_dict(found))


def test_copies_of_one_address_are_not_anothers(tmp_path: Path) -> None:
    """Whoever claims at another address to have the same bytes has to have them."""
    shelf = AdapterShelf(tmp_path / "shelf", 1 << 30)
    url, _ = pushed(tmp_path, "a")
    shelf.fetch(url)
    thief = S3Store("models", f"{tmp_path.name}/thief")
    for name in ("manifest.msgpack", "adapter_config.json"):
        thief.write(name, store_of(url).read(name))
    with pytest.raises(ObjectMissing):
        shelf.fetch(thief.url)


def test_the_copy_unused_for_longest_goes_first_and_none_in_use(tmp_path: Path) -> None:
    urls = [pushed(tmp_path, name, seed)[0] for seed, name in enumerate("abc")]
    size = Path(AdapterShelf(tmp_path / "shelf", 0).fetch(urls[0])["path"]).stat().st_size
    shelf = AdapterShelf(tmp_path / "shelf", 2 * size)
    paths = [Path(shelf.fetch(url)["path"]) for url in urls]
    assert sorted(paths) == copies(tmp_path), "all were used just now"
    for age, path in zip((3, 2, 1), paths, strict=True):
        used = time.time() - IN_USE_S - age
        os.utime(path, (used, used))
    assert shelf.keeps(paths[0])
    shelf.fetch(urls[2])
    assert copies(tmp_path) == sorted([paths[0], paths[2]])


async def ask(adapters: OwnAdapters, name: str) -> Any:
    """The fields, or the error record and whether to try again."""
    answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    adapters.ask(name, answer.set_result, lambda error, retry: answer.set_result((error, retry)))
    return await asyncio.wait_for(answer, 30)


async def test_a_replica_finds_each_adapter_once_and_again_after_a_failure(tmp_path: Path) -> None:
    url, _ = pushed(tmp_path, "a")
    missing = f"s3://models/{tmp_path.name}/later"
    shelf = AdapterShelf(tmp_path / "shelf", 1 << 30)
    adapters = OwnAdapters({"a": url, "later": missing}, shelf)
    found = await ask(adapters, "a")
    push_model(random_folder(tmp_path / "a", TINY, 7), url)
    assert await ask(adapters, "a") == found, "one version for as long as the replica lives"
    Path(found["path"]).unlink()
    assert (await ask(adapters, "a"))["revision"] != found["revision"], "unless its copy is gone"
    error, retry = await ask(adapters, "later")
    assert (error["code"], retry) == ("adapter_failed", False) and "no adapter was published there" in error["message"]
    push_model(random_folder(tmp_path / "later", TINY, 8), missing)
    assert (await ask(adapters, "later"))["rank"] == 8
    error, retry = await ask(adapters, "other")
    assert "doesn't have it" in error["message"] and not retry
    await adapters.close()


async def test_an_outage_of_the_store_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(url: str) -> None:
        raise StoreUnavailable(url, None, "it is down")

    shelf = AdapterShelf(tmp_path / "shelf", 1 << 30)
    monkeypatch.setattr(shelf, "fetch", fails)
    adapters = OwnAdapters({"a": "s3://models/x"}, shelf)
    error, retry = await ask(adapters, "a")
    assert retry and "it is down" in error["message"]
    await adapters.close()


async def test_what_the_engine_refused_is_fetched_anew(tmp_path: Path) -> None:
    url, _ = pushed(tmp_path, "a")
    adapters = OwnAdapters({"a": url}, AdapterShelf(tmp_path / "shelf", 1 << 30))
    found = await ask(adapters, "a")
    Path(found["path"]).write_bytes(b"damaged")
    assert adapters.distrust("a"), "another attempt may help"
    assert await ask(adapters, "a") == found
    read(AdapterFile.from_dict(found))
    await adapters.close()
