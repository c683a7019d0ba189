"""Virtual environments for the libraries that stoker is measured beside, under .stoker/bench-peers."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

FOLDER = Path(".stoker").resolve() / "bench-peers"


class PeerFailed(Exception):
    pass


def peer_python(name: str, requirements: Sequence[str]) -> Path:
    """The interpreter with `requirements` installed, this one when there are none; raises PeerFailed when pip can't."""
    if not requirements:
        return Path(sys.executable)
    folder = FOLDER / name
    python, wanted = folder / "bin" / "python", "\n".join(requirements)
    mark = folder / "requirements.txt"
    if not mark.exists() or mark.read_text() != wanted:
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
        pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", "--disable-pip-version-check"]
        installed = subprocess.run([*pip, *requirements], capture_output=True, text=True)
        if installed.returncode:
            raise PeerFailed(installed.stderr.strip().splitlines()[-1])
        mark.write_text(wanted)
    return python


def peer_environment(requirements: Sequence[str]) -> dict[str, str]:
    """A peer sees its own venv only; stoker comes from wherever this interpreter has it."""
    return {key: value for key, value in os.environ.items() if key != "PYTHONPATH" or not requirements}
