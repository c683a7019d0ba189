"""Triton's cache moved to another folder as an artifact: what was compiled is found there."""

import pytest

pytest.importorskip("triton")

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from stoker.coldstart.kernel_cache import KernelsUnusable, pack, unpack
from stoker.kernels import activation, launch

HOPPER = GPUTarget("cuda", 90, 32)
CONSTANTS = {"WIDTH": 64, "BLOCK": 64, "EARLY": False}
SIGNATURE = {"gate_up_ptr": "*bf16", "out_ptr": "*bf16", "stride": "i32"} | dict.fromkeys(CONSTANTS, "constexpr")


def compile_one() -> dict[str, int]:
    """What this compilation added to the counts."""
    kernel, before = activation._silu_mul, launch.origins()
    folded = {(kernel.arg_names.index(name),): value for name, value in CONSTANTS.items()}
    triton.compile(ASTSource(kernel, SIGNATURE, folded, {}), target=HOPPER)
    return {name: count - before[name] for name, count in launch.origins().items()}


def test_a_kernel_compiled_elsewhere_is_found_in_the_unpacked_artifact(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "one"))
    assert compile_one() == {"compiled": 1, "restored": 0, "late": 1}
    artifact = pack(tmp_path / "one", "key")
    (tmp_path / "one").rename(tmp_path / "gone")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "two"))
    with pytest.raises(KernelsUnusable):
        unpack(artifact, "another", tmp_path / "two")
    with launch.warming_up():
        assert compile_one() == {"compiled": 1, "restored": 0, "late": 0}
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "three"))
    unpack(artifact, "key", tmp_path / "three")
    assert compile_one() == {"compiled": 0, "restored": 1, "late": 0}


def test_priming_leaves_only_lookups(monkeypatch):
    launch.prime()
    monkeypatch.setattr("builtins.open", None)
    launch.prime()
