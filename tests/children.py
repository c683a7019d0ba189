"""Child processes of tests: none is left behind, not even by a test that fails."""

import subprocess
from typing import Any

GRACE_S = 20.0


def end(process: "subprocess.Popen[Any]", grace_s: float = GRACE_S) -> None:
    """SIGTERM, and SIGKILL for what is still there after `grace_s`. Without a grace SIGKILL at once; with one, that it
    was not enough is an error."""
    try:
        if grace_s:
            process.terminate()
            process.wait(grace_s)
    finally:
        process.kill()
        process.wait()
