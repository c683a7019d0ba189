import zipfile
from io import BytesIO
from pathlib import Path

import pytest

from stoker.runtime.deployment import Upload, load_apps, make_bundle
from stoker.runtime.spec import InvalidSpec
from stoker.runtime.worker.bundles import extract

APP = """
import stoker
app = stoker.App("shop", include=("helpers",))

@app.function(batch=stoker.Batch(4, 1), max_replicas=3)
def prices(items): return items
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "helpers").mkdir()
    (tmp_path / "helpers" / "rates.py").write_text("RATE = 2\n")
    (tmp_path / "secret.env").write_text("password\n")
    path = tmp_path / "shop_app.py"
    path.write_text(APP)
    return path


def names(data: bytes) -> list[str]:
    return zipfile.ZipFile(BytesIO(data)).namelist()


def test_an_app_declares_its_functions(project: Path) -> None:
    (app,) = load_apps(project)
    spec = app.functions["prices"]
    assert (spec.entry, spec.batch.max_size, spec.scaling.max_replicas) == ("shop_app:prices", 4, 3)  # type: ignore[union-attr]


def test_a_bundle_has_the_app_and_what_it_includes_and_nothing_else(project: Path) -> None:
    assert names(make_bundle(project, ("helpers",)).data) == ["helpers/rates.py", "shop_app.py"]


def test_the_same_code_gives_the_same_bundle(project: Path) -> None:
    first = make_bundle(project, ("helpers",))
    (project.parent / "helpers" / "rates.py").touch()
    assert make_bundle(project, ("helpers",)) == first
    (project.parent / "helpers" / "rates.py").write_text("RATE = 3\n")
    assert make_bundle(project, ("helpers",)) != first


@pytest.mark.parametrize("include", ["../elsewhere", "missing"])
def test_what_can_not_be_included_is_named(project: Path, include: str) -> None:
    with pytest.raises(InvalidSpec, match=include):
        make_bundle(project, (include,))


def test_a_module_that_is_included_by_its_name_is_told_its_files(project: Path) -> None:
    (project.parent / "rates.py").write_text("RATE = 2\n")
    with pytest.raises(InvalidSpec, match="include='rates' is not a file or folder .*; write 'rates.py'$"):
        make_bundle(project, ("rates",))


@pytest.mark.parametrize("text", ["", "import stoker\napp = stoker.App('empty')\n"])
def test_a_file_without_functions_says_what_to_write(tmp_path: Path, text: str) -> None:
    path = tmp_path / "nothing.py"
    path.write_text(text)
    with pytest.raises(InvalidSpec, match="@app.function"):
        load_apps(path)


def test_a_file_that_is_missing_or_has_an_impossible_name(tmp_path: Path) -> None:
    with pytest.raises(InvalidSpec, match="not a file"):
        load_apps(tmp_path / "absent.py")
    path = tmp_path / "my-app.py"
    path.write_text(APP)
    with pytest.raises(InvalidSpec, match="rename"):
        load_apps(path)


def test_an_app_that_can_not_be_imported_shows_the_users_own_lines(tmp_path: Path) -> None:
    path = tmp_path / "broken.py"
    path.write_text("def helper():\n    return 1 / 0\n\nhelper()\n")
    with pytest.raises(InvalidSpec, match="ZeroDivisionError") as caught:
        load_apps(path)
    assert "return 1 / 0" in str(caught.value) and "deployment.py" not in str(caught.value)


def test_bundles_can_not_write_outside_their_folder(tmp_path: Path) -> None:
    buffer = BytesIO()
    with zipfile.ZipFile(buffer, "w") as bundle:
        bundle.writestr("../evil.py", "x = 1")
    with pytest.raises(ValueError, match="outside"):
        extract(buffer.getvalue(), tmp_path / "inside")


def test_a_bundle_is_sent_in_parts_and_says_how_far_it_is() -> None:
    said: list[tuple[int, int]] = []
    data = bytes(range(256)) * 2500
    upload = Upload(data, lambda done, total: said.append((done, total)))
    assert b"".join(upload) == b"".join(upload) == data, "it can be sent again"
    assert said[: len(said) // 2] == [(1 << 18, len(data)), (2 << 18, len(data)), (len(data), len(data))]


def test_a_syntax_error_is_shown_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "broken.py"
    path.write_text("def f(:\n    pass\n")
    with pytest.raises(InvalidSpec, match="SyntaxError") as caught:
        load_apps(path)
    assert "def f(:" in str(caught.value) and "importlib" not in str(caught.value)


def test_what_an_import_prints_goes_to_standard_error(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "noisy_app.py").write_text(
        "import os, stoker\nprint('from Python')\nos.system('echo from a child')\napp = stoker.App('noisy')\n"
        "@app.function()\ndef f(x): return x\n"
    )
    print("before")
    load_apps(tmp_path / "noisy_app.py")
    print("after")
    assert capfd.readouterr() == ("before\nafter\n", "from Python\nfrom a child\n")
