"""What a worker couldn't find or import is refused before anything is sent."""

from pathlib import Path

import pytest

from stoker.runtime.deployment import load_apps, make_bundle
from stoker.runtime.module_names import module_of
from stoker.runtime.spec import InvalidSpec

HEAD = "import sys, stoker\napp = stoker.App('shop')\n"


def write(folder: Path, text: str, name: str = "findable_app.py") -> Path:
    path = folder / name
    path.write_text(HEAD + text)
    return path


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("def make():\n    @app.function()\n    def f(x): return x\nmake()\n", "it is defined inside make()"),
        (
            "def make():\n    @app.cls()\n    class F:\n        @stoker.method\n        def f(self): ...\nmake()\n",
            "inside make",
        ),
        ("f = app.function(name='f')(lambda x: x)\n", "it is a lambda"),
        ("app.function()(lambda x: x)\n", "a lambda can't be deployed: write it as a def"),
        ("@app.function()\ndef f(x): return x\ndel f\n", "there is no f in findable_app.py"),
        (
            "@app.function(name='a')\ndef f(x): return 1\n@app.function(name='b')\ndef f(x): return 2\n",
            "is 'b', which was defined later under the same Python name",
        ),
        ("@app.function()\ndef naïve(x): return x\n", "give it @app.function(name="),
        ("app.function()(3)\n", "goes above a def, which 3 is not"),
        ("@app.function()\ndef f(x): return x\nsys.exit(0)\n", "it ends the program"),
        ("class Odd(BaseException): ...\nraise Odd('no')\n", "Odd: no"),
    ],
)
def test_a_function_that_no_worker_would_find(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(InvalidSpec) as caught:
        load_apps(write(tmp_path, text))
    assert said in str(caught.value)


def test_other_decorators_and_names_in_any_script_are_found(tmp_path: Path) -> None:
    text = """
from functools import wraps
def logged(f):
    @wraps(f)
    def inside(*given): return f(*given)
    return inside
@app.function()
@logged
def below(x): return x
@logged
@app.function()
def above(x): return x
class Outer:
    @app.cls(name="inner")
    class Inner:
        @stoker.method
        def go(self, x): return x
@app.function(name="naive")
def naïve(x): return x
"""
    (app,) = load_apps(write(tmp_path, text))
    entries = {name: spec.entry.partition(":")[2] for name, spec in app.functions.items()}
    assert entries == {"below": "below", "above": "above", "inner": "Outer.Inner.go", "naive": "naïve"}


@pytest.mark.parametrize("name", ["queue.py", "json.py", "redis.py", "torch.py", "stoker.py", "pydantic_core.py"])
def test_a_name_that_a_worker_needs_for_itself(tmp_path: Path, name: str) -> None:
    path = write(tmp_path, "raise AssertionError('imported')\n", name)
    with pytest.raises(InvalidSpec, match=f"{name} has the name of .*: rename it"):
        load_apps(path)
    shop = write(tmp_path, "@app.function()\ndef f(x): return x\n")
    with pytest.raises(InvalidSpec, match=f"{name} has the name of"):
        make_bundle(shop, (name,))


def test_only_what_is_imported_by_its_name_alone_takes_it() -> None:
    paths = ["queue.py", "json/__init__.py", "json/data.py", "data/queue.py", "queue.txt", "a/json/__init__.py"]
    assert [module_of(Path(path)) for path in paths] == ["queue", "json", "", "", "", ""]
