import json
from pathlib import Path

import pytest

from stoker.coldstart.failures import StoreUnavailable
from stoker.coldstart.kernel_cache import file_names
from stoker.coldstart.store import ObjectStore, open_store
from stoker.runtime.worker.kernel_store import (
    EngineKernels,
    KernelStore,
    compiler_facts,
    empty_folder,
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


def start(kernels: KernelStore, cache: Path, compiled: tuple[str, ...] = ()) -> tuple[str, int, bool]:
    """An engine's start: where its kernels came from, how many files, and whether an artifact was made."""
    found = kernels.read("model")
    kernels.place(found, empty_folder(cache))
    for name in compiled:
        compile_into(cache, name)
    return found.source, len(found.files), kernels.keep("model", found, cache)


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
    one, cache = host(tmp_path, shared, "one"), empty_folder(tmp_path / "a")
    first = EngineKernels(one, "model", cache)
    (phase,) = await first.place()
    assert (phase["name"], phase["source"], phase["files"], phase["bytes"]) == ("kernel restore", "none", 0, 0)
    compile_into(cache, "k")
    await first.keep()
    second = EngineKernels(one, "model", empty_folder(tmp_path / "b"))
    (phase,) = await second.place()
    assert (phase["source"], phase["files"]) == ("disk", 2) and phase["bytes"] > 0
    assert phase["start_ns"] < phase["end_ns"]
    (tmp_path / "b").rename(tmp_path / "gone")
    await second.keep()


async def test_without_a_gpu_nothing_is_kept(tmp_path: Path) -> None:
    kernels = EngineKernels(None, "model", tmp_path / "a")
    assert await kernels.place() == []
    await kernels.keep()
    assert list(tmp_path.iterdir()) == []


def test_another_gpu_finds_nothing(tmp_path: Path, shared: ObjectStore) -> None:
    start(host(tmp_path, shared, "one"), tmp_path / "a", ("k",))
    assert start(host(tmp_path, shared, "one", gpu="NVIDIA H100"), tmp_path / "a") == ("none", 0, True)


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
