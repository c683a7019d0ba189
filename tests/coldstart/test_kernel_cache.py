import json
from pathlib import Path

import pytest

from stoker.coldstart.kernel_cache import KernelsUnusable, artifact_key, file_names, pack, unpack

KEY = "k" * 64


def cache(folder: Path, kernels: int = 3) -> Path:
    """What Triton leaves behind: a folder per kernel with its files, and the absolute paths of those in a group."""
    for number in range(kernels):
        home = folder / f"HASH{number}"
        home.mkdir(parents=True)
        paths = {name: str(home / name) for name in (f"k{number}.cubin", f"k{number}.json")}
        (home / f"k{number}.cubin").write_bytes(bytes([number]) * 5000)
        (home / f"k{number}.json").write_text(json.dumps({"name": f"k{number}"}))
        (home / f"__grp__k{number}.json").write_text(json.dumps({"child_paths": paths}))
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in file_names(folder)}


def test_an_unpacked_cache_is_the_packed_one_at_its_own_place(tmp_path: Path) -> None:
    here, there = cache(tmp_path / "here"), tmp_path / "there"
    artifact = pack(here, KEY)
    assert str(tmp_path).encode() not in artifact
    assert unpack(artifact, KEY, there) == 9
    groups = {name for name in file_names(there) if "__grp__" in name}
    assert len(groups) == 3
    for name in groups:
        for child, path in json.loads((there / name).read_text())["child_paths"].items():
            assert Path(path) == (there / name).parent / child and Path(path).is_file()
    rest = file_names(there) - groups
    assert {name: contents(there)[name] for name in rest} == {name: contents(here)[name] for name in rest}
    assert pack(there, KEY) == artifact


def test_what_is_there_stays_and_unfinished_files_are_not_packed(tmp_path: Path) -> None:
    here, there = cache(tmp_path / "here"), tmp_path / "there"
    (here / "HASH0" / "tmp.pid_1_x").mkdir()
    (here / "HASH0" / "tmp.pid_1_x" / "k0.cubin").write_bytes(b"half")
    (there / "HASH0").mkdir(parents=True)
    (there / "HASH0" / "k0.cubin").write_bytes(b"own")
    assert unpack(pack(here, KEY), KEY, there) == 9
    assert (there / "HASH0" / "k0.cubin").read_bytes() == b"own"


def test_no_altered_or_cut_artifact_is_used(tmp_path: Path) -> None:
    artifact = pack(cache(tmp_path / "here"), KEY)
    there = tmp_path / "there"
    for position in [*range(0, len(artifact), 97), len(artifact) - 1]:
        damaged = bytearray(artifact)
        damaged[position] ^= 4
        with pytest.raises(KernelsUnusable):
            unpack(bytes(damaged), KEY, there)
    for length in [0, 10, 40, 300, len(artifact) - 1]:
        with pytest.raises(KernelsUnusable):
            unpack(artifact[:length], KEY, there)
    with pytest.raises(KernelsUnusable, match="bytes"):
        unpack(artifact + b"x", KEY, there)
    assert not there.exists()


def test_an_artifact_for_something_else_is_not_used(tmp_path: Path) -> None:
    with pytest.raises(KernelsUnusable, match="made for"):
        unpack(pack(cache(tmp_path / "here"), KEY), "other", tmp_path / "there")


def test_no_file_leaves_its_folder(tmp_path: Path) -> None:
    (tmp_path / "here" / "a" / "b").mkdir(parents=True)
    (tmp_path / "here" / "a" / "b" / "c").write_text("deep")
    with pytest.raises(KernelsUnusable, match="no file of a kernel cache"):
        unpack(pack(tmp_path / "here", KEY), KEY, tmp_path / "there")


def test_the_key_tells_versions_gpus_and_sources_apart(tmp_path: Path) -> None:
    source = tmp_path / "kernel.py"
    source.write_text("one")
    facts = {"gpu": "NVIDIA H200", "triton": "3.6.0"}
    keys = {artifact_key(facts, [source]), artifact_key({**facts, "triton": "3.7.0"}, [source])}
    keys |= {artifact_key({**facts, "gpu": "NVIDIA H100"}, [source]), artifact_key(facts, [])}
    source.write_text("two")
    keys.add(artifact_key(facts, [source]))
    assert len(keys) == 5
    assert artifact_key(dict(reversed(facts.items())), [source]) in keys
