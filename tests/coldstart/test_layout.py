"""Host agents and gateways use this room without torch."""

import subprocess
import sys
from pathlib import Path

import stoker

FOLDER = Path(str(stoker.__file__)).parent / "coldstart"


def test_only_upload_imports_torch():
    names = [path.stem for path in sorted(FOLDER.glob("*.py")) if path.stem != "upload"]
    assert len(names) > 15
    code = f"import sys, importlib\nfor name in {names}: importlib.import_module('stoker.coldstart.' + name)\n"
    code += "assert not {'torch', 'triton', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
