"""What must hold of the tree itself: import directions, no torch in the control plane, names, sizes, packaging."""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ROOMS = ("kernels", "queue", "coldstart", "runtime")
MAX_LINES = 400
MAX_FUNCTION_LINES = 40
ALLOWED = {
    "kernels": {"kernels"},
    "queue": {"queue"},
    "coldstart": {"coldstart"},
    "runtime": {"kernels", "queue", "coldstart", "runtime"},
}


# Lines of all files together.
READ_IN_AN_AFTERNOON = {"engine": 4000, "kernels": 2000}
# What only people who write their own programs call.
FOR_USERS = {"stream", "wait"}
WORD = re.compile(r"\w+")


def sources(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return found


@pytest.mark.parametrize("room", ROOMS)
def test_rooms_import_only_what_they_may(room: str) -> None:
    for path in sources(room):
        for name in imports(path):
            if name.startswith("stoker."):
                assert name.split(".")[1] in ALLOWED[room], f"{path} imports {name}"


@pytest.mark.parametrize("part", ["gateway", "controller"])
def test_gateway_and_controller_do_not_import_the_engine(part: str) -> None:
    for path in sources(f"runtime/{part}"):
        assert not any(name.startswith("stoker.runtime.engine") for name in imports(path)), path


@pytest.mark.parametrize(
    "module",
    [
        "stoker.runtime.gateway.server",
        "stoker.runtime.controller.controller",
        "stoker.runtime.worker.agent",
        "stoker.runtime.worker.function_process",
        "stoker.runtime.supervisor",
        "stoker.runtime.cli",
        "stoker.runtime.sdk",
        "stoker.runtime.client.client",
    ],
)
def test_control_plane_never_imports_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit(any(m in sys.modules for m in ('torch', 'triton')))"
    assert subprocess.run([sys.executable, "-c", code], cwd="/").returncode == 0


def test_standard_library_queue_is_not_shadowed() -> None:
    code = "import queue, concurrent.futures; assert hasattr(queue, 'SimpleQueue'); import stoker; assert stoker.App"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_only_the_root_has_an_init_file() -> None:
    assert [path for room in ROOMS for path in (ROOT / room).rglob("__init__.py")] == []


def test_packages_listed_for_the_wheel_are_the_folders() -> None:
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())
    folders = {path.parent.relative_to(ROOT) for room in ROOMS for path in sources(room)}
    names = {"stoker", *("stoker." + ".".join(folder.parts) for folder in folders)}
    assert names == set(config["tool"]["setuptools"]["packages"])


def test_no_file_is_named_like_a_module_that_it_would_hide() -> None:
    dependencies = {"redis", "msgpack", "torch", "triton", "boto3", "httpx", "typer", "rich", "jinja2", "tokenizers"}
    for room in ROOMS:
        for path in sources(room):
            assert path.stem not in sys.stdlib_module_names | dependencies, path


@pytest.mark.parametrize("room", ROOMS)
def test_files_and_functions_stay_small(room: str) -> None:
    for path in sources(room):
        assert path.read_text().count("\n") <= MAX_LINES, path
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or 0) - node.lineno + 1
                assert lines <= MAX_FUNCTION_LINES, f"{path}:{node.lineno} {node.name} has {lines} lines"


@pytest.mark.parametrize("room", ROOMS)
def test_every_file_says_what_it_is_for(room: str) -> None:
    for path in sources(room):
        least = 8 if path.parent.name in READ_IN_AN_AFTERNOON else 1
        assert len((ast.get_docstring(tree_of(path)) or "").split()) >= least, path


@pytest.mark.parametrize("room", READ_IN_AN_AFTERNOON)
def test_a_room_is_read_in_an_afternoon(room: str) -> None:
    folder = {"engine": "runtime/engine"}.get(room, room)
    assert sum(path.read_text().count("\n") for path in sources(folder)) <= READ_IN_AN_AFTERNOON[room]


def definitions(node: ast.Module | ast.ClassDef) -> Iterator[str]:
    """Functions, classes and constants; not what a framework calls: decorated functions, methods of derived classes."""
    for child in node.body:
        if isinstance(child, ast.ClassDef):
            yield child.name
            if not child.bases:
                yield from definitions(child)
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) and not child.decorator_list:
            yield child.name
        elif isinstance(child, ast.Assign) and isinstance(node, ast.Module):
            yield from (target.id for target in child.targets if isinstance(target, ast.Name))


def uses(tree: ast.Module) -> Iterator[str]:
    """Names that are read, and words in strings: code can stand there too."""
    prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
            yield from WORD.findall(node.value)


def test_nothing_is_there_for_tests_alone() -> None:
    paths = [ROOT / "__init__.py", *(path for room in (*ROOMS, "benchmarks", "examples") for path in sources(room))]
    used = FOR_USERS.union(*(uses(tree_of(path)) for path in paths))
    for path in (path for room in ROOMS for path in sources(room)):
        unused = {name for name in definitions(tree_of(path)) if not name.startswith("__")} - used
        assert not unused, f"{path}: nothing uses {', '.join(sorted(unused))}"
