"""Host agents and gateways use this room without torch."""

import subprocess
import sys
from pathlib import Path

import stoker

DEVICE_HALF = {"arrival", "device_check", "host_image", "mapped_source", "pinned", "upload", "xxh3"}
FOLDER = Path(str(stoker.__file__)).parent / "coldstart"


def test_only_the_device_half_imports_torch():
    names = [path.stem for path in sorted(FOLDER.glob("*.py")) if path.stem not in DEVICE_HALF]
    assert len(names) > 15
    code = f"import sys, importlib\nfor name in {names}: importlib.import_module('stoker.coldstart.' + name)\n"
    code += "assert not {'torch', 'triton', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
