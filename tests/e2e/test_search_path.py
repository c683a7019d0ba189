"""A function finds its own files and what is installed, not what lies where `stoker up` was started."""

from pathlib import Path

import pytest

from stoker.runtime.local import LocalStack

APP = """
import sys
import stoker

app = stoker.App("path")

@app.function()
def find(name):
    try:
        return getattr(__import__(name), "__file__", "")
    except ImportError:
        return sys.path
"""


def test_the_folder_of_the_start_is_not_searched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever stands there would be found before what is installed."""
    start = tmp_path / "start"
    start.mkdir()
    (start / "lies_there.py").write_text("")
    (tmp_path / "path_app.py").write_text(APP)
    monkeypatch.chdir(start)
    with LocalStack(tmp_path / "data") as stack, stack.client() as client:
        stack.deploy(tmp_path / "path_app.py")
        searched = client.invoke("find", "lies_there")
    assert isinstance(searched, list), searched
    assert not {"", ".", str(start)} & set(searched)
