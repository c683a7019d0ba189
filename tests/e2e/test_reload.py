"""`stoker up --reload`: what is saved is deployed; what is broken is told, and what worked serves on."""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from stoker.runtime.client.client import Client
from stoker.runtime.processes import parent_mark
from stoker.runtime.supervisor import read_state
from tests.children import end

APP = """
import stoker
app = stoker.App("web", include=("lib",))
@app.function(idle_timeout=60)
def hello(x):
    from lib import words
    return [{word!r}, words.HI]
"""


def replace(path: Path, text: str) -> None:
    """As editors save."""
    scratch = path.with_suffix(".tmp")
    scratch.write_text(text)
    scratch.replace(path)


@contextlib.contextmanager
def up(folder: Path, file: Path) -> Iterator[Callable[[], Client]]:
    """`stoker up --reload`; what is given makes a client, once the gateway answers."""
    data, out = folder / "data", (folder / "out").open("w")
    command = [sys.executable, "-m", "stoker.runtime.cli", "up", "--reload", str(file), "--data", str(data)]
    command += ["--port", "0", "--auth", "keys"]
    env = {**os.environ, "STOKER_SECRET": "s" * 40, **parent_mark(os.getpid())}
    process = subprocess.Popen(command, stdout=out, stderr=out, env=env)

    def client() -> Client:
        state = read_state(data)
        assert state
        key = subprocess.check_output([*command[:3], "tenants", "root-key"], env=env, text=True).strip()
        return Client(str(state["url"]), key)

    try:
        yield client
    finally:
        end(process, 60)
        out.close()
    assert process.returncode == 0


def test_a_file_and_what_it_includes_are_deployed_when_they_change(tmp_path: Path) -> None:
    file, words = tmp_path / "web_app.py", tmp_path / "lib" / "words.py"
    words.parent.mkdir()
    words.write_text("HI = 1\n")
    file.write_text("import no_such_module\n")
    with up(tmp_path, file) as connect:
        until(lambda: "no_such_module" in said(tmp_path) and "import no_such_module" in said(tmp_path))
        replace(file, APP.format(word="a"))
        until(lambda: said(tmp_path).count("deployed hello") == 1)
        with connect() as client:
            assert client.invoke("hello") == ["a", 1]
            replace(words, "HI = 2\n")
            until(lambda: client.invoke("hello") == ["a", 2])
            replace(file, APP.format(word="b"))
            until(lambda: client.invoke("hello") == ["b", 2])
            (words.parent / "deeper").mkdir()
            time.sleep(1.5)
            (tmp_path / "unrelated.py").write_text("not watched")
            before = said(tmp_path).count("deployed hello")
            replace(file, APP.format(word="c") + "def broken(:\n")
            until(lambda: "SyntaxError" in said(tmp_path) and "def broken(:" in said(tmp_path))
            assert client.invoke("hello") == ["b", 2]
            assert said(tmp_path).count("deployed hello") == before
            replace(file, APP.format(word="d"))
            until(lambda: client.invoke("hello") == ["d", 2])
            assert [row["current"] for row in client.request("GET", "/v1/apps/web/versions")["data"]].count(True) == 1


def test_what_kept_a_file_from_being_imported_is_noticed_when_it_is_put_right(tmp_path: Path) -> None:
    file, words = tmp_path / "web_app.py", tmp_path / "lib" / "words.py"
    words.parent.mkdir()
    words.write_text("HI = (\n")
    at_once = APP.replace("import stoker", "import stoker\nimport lib.words")
    file.write_text(at_once.format(word="a"))
    with up(tmp_path, file) as connect:
        until(lambda: "SyntaxError" in said(tmp_path))
        replace(words, "HI = 1\n")
        until(lambda: said(tmp_path).count("deployed hello") == 1)
        with connect() as client:
            replace(words, "while True: pass\n")
            until(lambda: said(tmp_path).count("changed: deploying") == 2)
            time.sleep(2.0)
            assert client.invoke("hello") == ["a", 1]
            replace(words, "HI = 2\n")
            until(lambda: client.invoke("hello") == ["a", 2])


def said(folder: Path) -> str:
    return (folder / "out").read_text()


def until(look: Callable[[], bool], timeout_s: float = 90) -> None:
    deadline = time.monotonic() + timeout_s
    while not look():
        assert time.monotonic() < deadline
        time.sleep(0.1)
