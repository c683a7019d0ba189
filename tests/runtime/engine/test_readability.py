"""Small enough to read in an afternoon: sizes of the engine and the kernels, and a head in every file."""

import ast
from pathlib import Path

import pytest

import stoker

ROOT = Path(str(stoker.__file__)).parent
FILES = [*sorted((ROOT / "runtime/engine").glob("*.py")), *sorted((ROOT / "kernels").glob("*.py"))]


@pytest.mark.parametrize(("folder", "most"), [("runtime/engine", 4000), ("kernels", 2000)])
def test_a_room_is_read_in_an_afternoon(folder: str, most: int) -> None:
    lines = sum(path.read_text().count("\n") for path in (ROOT / folder).glob("*.py"))
    assert lines <= most, f"{folder} has {lines} lines"


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_every_file_says_what_it_is_for(path: Path) -> None:
    head = ast.get_docstring(ast.parse(path.read_text())) or ""
    assert len(head.split()) >= 8, f"{path.name}: {head!r}"
