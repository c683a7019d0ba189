"""From an app's file to deployed functions: import it, bundle its code, send both to a gateway."""

import contextlib
import hashlib
import importlib.util
import os
import sys
import traceback
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from types import ModuleType
from typing import Any

from stoker.runtime.client.client import Client
from stoker.runtime.inputs import Inputs
from stoker.runtime.module_names import check_module_name, module_of
from stoker.runtime.sdk import App, Function
from stoker.runtime.spec import FunctionSpec, InvalidSpec

EPOCH = (1980, 1, 1, 0, 0, 0)
MAX_BUNDLE = 50 << 20
PART = 1 << 18

Moved = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Bundle:
    digest: str
    data: bytes


def load_apps(path: Path) -> list[App]:
    """The App objects of a Python file, imported under its own name. Raises InvalidSpec when there is none."""
    if not path.is_file():
        raise InvalidSpec(f"{path} is not a file; name the Python file that holds your stoker.App")
    module = import_file(path)
    apps = [value for value in vars(module).values() if isinstance(value, App)]
    if not any(app.functions for app in apps):
        raise InvalidSpec(
            f"{path} declares no function: make app = stoker.App('name') and decorate one with @app.function()"
        )
    for app in apps:
        for spec in app.functions.values():
            check_entry(spec)
    return [app for app in apps if app.functions]


def check_entry(spec: FunctionSpec) -> None:
    """That a worker finds the function by its name in its module. Raises InvalidSpec."""
    if spec.kind == "python" and (why := why_unfindable(spec)):
        raise InvalidSpec(
            f"function {spec.name!r} can't be deployed: {why}. A worker imports the file and takes the function by its "
            "Python name: write it as a def (or a class) of its own at the top level of the file"
        )


def why_unfindable(spec: FunctionSpec) -> str:
    module, _, path = spec.entry.partition(":")
    if "<lambda>" in path:
        return "it is a lambda"
    if "<locals>" in path:
        return f"it is defined inside {path.partition('.<locals>')[0]}()"
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        found = getattr(found, part, None)
    if found is None:
        return f"there is no {path} in {module}.py once that is imported"
    if isinstance(found, Function) and found.spec.name != spec.name:
        return f"{path} in {module}.py is {found.spec.name!r}, which was defined later under the same Python name"
    return ""


def import_file(path: Path) -> ModuleType:
    name = path.stem
    if not name.isidentifier():
        raise InvalidSpec(f"{path.name} can't be imported: rename it to letters, digits and '_'")
    check_module_name(path.name, name)
    location = importlib.util.spec_from_file_location(name, path)
    assert location and location.loader
    module = importlib.util.module_from_spec(location)
    sys.path.insert(0, str(path.parent.resolve()))
    sys.modules[name] = module
    try:
        with printing_aside():
            location.loader.exec_module(module)
    except (InvalidSpec, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise InvalidSpec(import_problem(path, error)) from error
    finally:
        sys.path.pop(0)
    return module


@contextlib.contextmanager
def printing_aside() -> Iterator[None]:
    """What users' code and its children print goes to standard error: standard output is the command's own."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        sys.stderr.flush()
        os.dup2(kept, 1)
        os.close(kept)


def import_problem(path: Path, error: BaseException) -> str:
    """The error with the lines of the user's own code that led to it."""
    folder = path.parent.resolve()
    frames = traceback.extract_tb(error.__traceback__)
    files = [frame for frame in frames if not frame.filename.startswith("<")]
    own = [frame for frame in files if Path(frame.filename).resolve().is_relative_to(folder)]
    where = "".join([*traceback.format_list(own), *traceback.format_exception_only(error)]).rstrip()
    ends = isinstance(error, SystemExit)
    why = "it ends the program; put what only a script does below `if __name__ == '__main__':`" if ends else ""
    return f"{path} can't be imported:{why and ' '}{why}\n{where}"


def bundle_files(path: Path, include: tuple[str, ...]) -> list[Path]:
    root = path.parent.resolve()
    files = {path.resolve()}
    for entry in include:
        target = (root / entry).resolve()
        if not target.is_relative_to(root) or not target.exists():
            as_file = f"; write {entry + '.py'!r}" if (root / f"{entry}.py").is_file() else ""
            raise InvalidSpec(f"include={entry!r} is not a file or folder under {root}{as_file}")
        files.update(p for p in ([target] if target.is_file() else target.rglob("*")) if p.is_file())
    for file in files:
        check_module_name(str(file.relative_to(root)), module_of(file.relative_to(root)))
    return sorted(p for p in files if "__pycache__" not in p.parts)


def make_bundle(path: Path, include: tuple[str, ...]) -> Bundle:
    """The same files give the same bytes, so that redeploying unchanged code changes nothing."""
    buffer = BytesIO()
    root = path.parent.resolve()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as bundle:
        for file in bundle_files(path, include):
            info = zipfile.ZipInfo(str(file.relative_to(root)), EPOCH)
            info.compress_type = zipfile.ZIP_DEFLATED
            bundle.writestr(info, file.read_bytes())
    data = buffer.getvalue()
    if len(data) > MAX_BUNDLE:
        raise InvalidSpec(f"the bundle of {path.name} is {len(data) >> 20} MiB, over {MAX_BUNDLE >> 20}; include less")
    return Bundle(hashlib.sha256(data).hexdigest(), data)


@dataclass(frozen=True, slots=True)
class Upload:
    """Bytes that are sent in parts; `moved` is told how many of them were."""

    data: bytes
    moved: Moved

    def __iter__(self) -> Iterator[bytes]:
        for start in range(0, len(self.data), PART):
            yield self.data[start : start + PART]
            self.moved(min(start + PART, len(self.data)), len(self.data))


def deploy(path: Path, client: Client, moved: Moved = lambda done, total: None) -> list[dict[str, Any]]:
    """Deploys every app in the file, each in one step; returns the gateway's records of the apps. `moved` is told the
    bytes of a bundle that were sent, and those in all."""
    return [deploy_app(app, path, client, moved) for app in load_apps(path)]


def deploy_app(app: App, path: Path, client: Client, moved: Moved) -> dict[str, Any]:
    specs = list(app.functions.values())
    if any(spec.kind == "python" for spec in specs):
        bundle = make_bundle(path, app.include)
        client.request("PUT", f"/v1/bundles/{bundle.digest}", content=Upload(bundle.data, moved))
        specs = [described(app, spec, bundle) if spec.kind == "python" else spec for spec in specs]
    return client.request("PUT", f"/v1/apps/{app.name}", json={"functions": [spec.to_dict() for spec in specs]})


def described(app: App, spec: FunctionSpec, bundle: Bundle) -> FunctionSpec:
    """With its code, and what its annotations say of its input. Raises InvalidSpec."""
    inputs = Inputs(app.bodies[spec.name], batched=spec.batch is not None)
    return replace(spec, code=bundle.digest, input_schema=inputs.schema(), takes=inputs.takes())
