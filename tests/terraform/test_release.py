"""What `make wheel` puts beside the wheel."""

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from terraform_runs import ROOT


@pytest.fixture(scope="module")
def builder() -> ModuleType:
    spec = importlib.util.spec_from_file_location("stoker_release", ROOT / "terraform" / "release.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_checksums_are_sha256sums(release: Path) -> None:
    done = subprocess.run(
        ["sha256sum", "--check", "--strict", "SHA256SUMS"], cwd=release, capture_output=True, text=True
    )
    assert done.returncode == 0
    named = {line.split(": ")[0] for line in done.stdout.splitlines()}
    assert named == {str(path.relative_to(release)) for path in release.rglob("*") if path.name != "SHA256SUMS"}


def test_gateways_and_controllers_install_no_torch(release: Path) -> None:
    control, worker = ((release / f"requirements-{role}.txt").read_text().split() for role in ("control", "worker"))
    assert control[:2] == worker[:2] == ["-c", "constraints.txt"]
    assert {line.split(">")[0] for line in worker} >= {"torch", "triton", "redis[hiredis]", "boto3"}
    assert not any(line.startswith(("torch", "triton")) for line in control)
    assert any(line.startswith("redis[hiredis]") for line in control)


def test_gateways_and_controllers_start_without_what_only_workers_have(builder: ModuleType) -> None:
    started = (
        "runtime.cli",
        "runtime.gateway.server",
        "runtime.controller.controller",
        "runtime.controller.aws_provider",
    )
    lines = ["import sys", *(f"sys.modules[{name!r}] = None" for name in builder.WORKERS_ONLY)]
    lines += [f"import stoker.{name}" for name in started]
    subprocess.run([sys.executable, "-c", "\n".join(lines)], check=True)


@pytest.mark.parametrize("wheels", [0, 2])
def test_a_release_has_one_wheel(builder: ModuleType, tmp_path: Path, wheels: int) -> None:
    for number in range(wheels):
        (tmp_path / f"stoker-{number}-py3-none-any.whl").touch()
    with pytest.raises(ValueError, match=f"holds {wheels} wheels of stoker instead of one: run `make wheel`"):
        builder.complete(tmp_path)


@pytest.mark.parametrize(
    ("requirement", "name"),
    [
        ("redis[hiredis]>=6", "redis"),
        ("Typing_Extensions", "typing-extensions"),
        ("triton>=3; platform == 'x'", "triton"),
    ],
)
def test_names_of_requirements(builder: ModuleType, requirement: str, name: str) -> None:
    assert builder.name_of(requirement) == name
