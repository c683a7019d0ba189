"""What must hold of the tree itself: import directions, no torch in the control plane, names, sizes, packaging."""

import ast
import subprocess
import sys
import tomllib
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


def sources(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
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
        text = path.read_text()
        assert text.count("\n") <= MAX_LINES, path
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or 0) - node.lineno + 1
                assert lines <= MAX_FUNCTION_LINES, f"{path}:{node.lineno} {node.name} has {lines} lines"
