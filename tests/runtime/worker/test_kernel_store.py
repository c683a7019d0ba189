import json
from pathlib import Path

import pytest

from stoker.coldstart.failures import StoreUnavailable
from stoker.coldstart.kernel_cache import file_names
from stoker.coldstart.store import ObjectStore, open_store
from stoker.runtime.worker.kernel_store import (
    EngineKernels,
    KernelCache,
    KernelStore,
    compiler_facts,
    gpu_model,
    kernel_sources,
)


def compile_into(cache: Path, name: str) -> None:
    home = cache / name.upper()
    home.mkdir(parents=True)
    (home / f"{name}.cubin").write_bytes(name.encode() * 100)
    paths = {f"{name}.cubin": str(home / f"{name}.cubin")}
    (home / f"__grp__{name}.json").write_text(json.dumps({"child_paths": paths}))


@pytest.fixture
def shared(tmp_path: Path) -> ObjectStore:
    return open_store((tmp_path / "store").as_uri())


def host(tmp_path: Path, shared: ObjectStore, name: str, gpu: str = "NVIDIA H200") -> KernelStore:
    return KernelStore(tmp_path / name, shared, gpu)


def empty(folder: Path) -> KernelCache:
    cache = KernelCache(folder)
    cache.empty()
    return cache


def start(kernels: KernelStore, folder: Path, compiled: tuple[str, ...] = ()) -> tuple[str, int, bool]:
    """An engine's start: where its kernels came from, how many files, and whether an artifact was made."""
    found, cache = kernels.read("model"), empty(folder)
    kernels.place(found, cache)
    count = len(found.files)
    for name in compiled:
        compile_into(folder, name)
    return found.source, count, kernels.keep("model", found, cache)


def test_the_first_engine_makes_the_artifact_and_other_hosts_start_with_it(tmp_path: Path, shared: ObjectStore) -> None:
    one, two = host(tmp_path, shared, "one"), host(tmp_path, shared, "two")
    assert start(one, tmp_path / "a", ("k", "l")) == ("none", 0, True)
    assert start(one, tmp_path / "a") == ("disk", 4, False)
    assert start(two, tmp_path / "b") == ("store", 4, False)
    assert start(two, tmp_path / "b", ("m",)) == ("disk", 4, True)
    assert start(host(tmp_path, shared, "three"), tmp_path / "c") == ("store", 6, False)


@pytest.mark.parametrize("position", [20, -1])
def test_a_damaged_artifact_is_made_again(
    tmp_path: Path, shared: ObjectStore, position: int, caplog: pytest.LogCaptureFixture
) -> None:
    one = host(tmp_path, shared, "one")
    start(one, tmp_path / "a", ("k",))
    (kept,) = (tmp_path / "one").iterdir()
    whole = kept.read_bytes()
    damaged = bytearray(whole)
    damaged[position] ^= 1
    kept.write_bytes(damaged)
    assert start(one, tmp_path / "a") == ("store", 2, False)
    assert kept.read_bytes() == whole
    kept.unlink()
    (stored,) = shared.list("kernels")
    shared.write(stored.key, bytes(damaged))
    assert start(one, tmp_path / "a", ("k",)) == ("none", 0, True)
    assert "checksum" in caplog.text
    assert start(host(tmp_path, shared, "two"), tmp_path / "b") == ("store", 2, False)


async def test_an_engines_kernels_are_read_placed_and_kept(tmp_path: Path, shared: ObjectStore) -> None:
    one, cache = host(tmp_path, shared, "one"), empty(tmp_path / "a")
    first = EngineKernels(one, "model", cache)
    (phase,) = await first.place()
    assert (phase["name"], phase["source"], phase["files"], phase["bytes"]) == ("kernel restore", "none", 0, 0)
    compile_into(cache.folder, "k")
    await first.keep()
    second = EngineKernels(one, "model", empty(tmp_path / "b"))
    (phase,) = await second.place()
    assert (phase["source"], phase["files"]) == ("disk", 2) and phase["bytes"] > 0
    assert phase["start_ns"] < phase["end_ns"]
    (tmp_path / "b").rename(tmp_path / "gone")
    await second.keep()


async def test_without_a_gpu_nothing_is_kept(tmp_path: Path) -> None:
    kernels = EngineKernels(None, "model", KernelCache(tmp_path / "a"))
    assert await kernels.place() == []
    await kernels.keep()
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_made_again_of_kernels_that_no_engine_compiled(
    tmp_path: Path, shared: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two models of one engine have one cache: what came with the other's artifact is not new."""
    one = host(tmp_path, shared, "one")
    written: list[str] = []
    write = shared.write

    def noted(key: str, data: bytes) -> None:
        written.append(key.rpartition("/")[2])
        write(key, data)

    monkeypatch.setattr(shared, "write", noted)
    for model, name in (("a", "k"), ("b", "l")):
        found, cache = one.read(model), empty(tmp_path / "cache")
        one.place(found, cache)
        compile_into(cache.folder, name)
        assert one.keep(model, found, cache)
        assert not one.keep(model, found, cache)
    cache = empty(tmp_path / "cache")
    first, second = one.read("a"), one.read("b")
    for model, found in (("a", first), ("b", second)):
        one.place(found, cache)
        assert (found.source, len(found.files), one.keep(model, found, cache)) == ("disk", 2, False)
    assert not one.keep("a", first, cache)
    assert written == ["a", "b"]
    compile_into(cache.folder, "m")
    assert one.keep("a", first, cache) and written == ["a", "b", "a"]


def test_an_engine_that_died_takes_nothing_from_the_artifact(tmp_path: Path, shared: ObjectStore) -> None:
    """The next one has an emptied cache when the model that was lost with the last one is unloaded."""
    one, cache = host(tmp_path, shared, "one"), empty(tmp_path / "cache")
    found = one.read("model")
    one.place(found, cache)
    assert not one.keep("model", found, cache)
    compile_into(cache.folder, "k")
    assert one.keep("model", found, cache)
    cache.empty()
    compile_into(cache.folder, "other")
    assert not one.keep("model", found, cache)
    assert len(host(tmp_path, shared, "two").read("model").artifact) == len(found.artifact)
    assert start(host(tmp_path, shared, "two"), tmp_path / "b") == ("disk", 2, False)


def test_another_gpu_finds_nothing(tmp_path: Path, shared: ObjectStore) -> None:
    start(host(tmp_path, shared, "one"), tmp_path / "a", ("k",))
    assert start(host(tmp_path, shared, "one", gpu="NVIDIA H100"), tmp_path / "a") == ("none", 0, False)
    assert start(host(tmp_path, shared, "one", gpu="NVIDIA H100"), tmp_path / "a", ("k",)) == ("none", 0, True)


def test_what_a_process_left_behind_is_not_used(tmp_path: Path, shared: ObjectStore) -> None:
    compile_into(tmp_path / "a", "stale")
    assert start(host(tmp_path, shared, "one"), tmp_path / "a", ("k",)) == ("none", 0, True)
    assert {name.partition("/")[0] for name in file_names(tmp_path / "a")} == {"K"}


def test_a_store_that_refuses_costs_only_the_sharing(
    tmp_path: Path, shared: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> bytes:
        raise StoreUnavailable("kernels", None, "down")

    one = host(tmp_path, shared, "one")
    monkeypatch.setattr(shared, "read", refuse)
    monkeypatch.setattr(shared, "write", refuse)
    assert start(one, tmp_path / "a", ("k",)) == ("none", 0, True)
    assert start(one, tmp_path / "a") == ("disk", 2, False)


def test_the_key_covers_every_kernel_and_both_compilers() -> None:
    names = {path.name for path in kernel_sources()}
    assert {"attention.py", "gemv.py", "launch.py", "tuned_h200.json", "prepare.py"} <= names
    facts = compiler_facts("NVIDIA H200")
    assert facts["gpu"] == "NVIDIA H200" and facts["triton"] and facts["torch"] and "cpython" in facts["python"]


def test_the_gpu_is_named_by_the_driver(tmp_path: Path) -> None:
    for bus, model in (("0000:01:00.0", "NVIDIA H200"), ("0000:02:00.0", "NVIDIA L4")):
        (tmp_path / bus).mkdir()
        (tmp_path / bus / "information").write_text(f"Model: \t\t {model}\nIRQ:   \t\t 1\n")
    names = [gpu_model(device, tmp_path) for device in ("cuda:0", "cuda:1", "cuda:2", "cpu")]
    assert names == ["NVIDIA H200", "NVIDIA L4", "", ""]
    assert gpu_model("cuda:0", tmp_path / "none") == ""
