"""From an app's file to deployed functions: import it, bundle its code, send both to a gateway."""

import hashlib
import importlib.util
import sys
import traceback
import zipfile
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from types import ModuleType
from typing import Any

from stoker.runtime.sdk import App, Client
from stoker.runtime.spec import InvalidSpec

EPOCH = (1980, 1, 1, 0, 0, 0)
MAX_BUNDLE = 50 << 20


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
    return [app for app in apps if app.functions]


def import_file(path: Path) -> ModuleType:
    name = path.stem
    if not name.isidentifier():
        raise InvalidSpec(f"{path.name} can't be imported: rename it to letters, digits and '_'")
    location = importlib.util.spec_from_file_location(name, path)
    assert location and location.loader
    module = importlib.util.module_from_spec(location)
    sys.path.insert(0, str(path.parent.resolve()))
    sys.modules[name] = module
    try:
        location.loader.exec_module(module)
    except InvalidSpec:
        raise
    except Exception as error:
        raise InvalidSpec(import_problem(path, error)) from error
    finally:
        sys.path.pop(0)
    return module


def import_problem(path: Path, error: Exception) -> str:
    """The error with the lines of the user's own code that led to it."""
    folder = path.parent.resolve()
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if Path(frame.filename).resolve().is_relative_to(folder)]
    where = "".join(traceback.format_list(own)).rstrip()
    return f"{path} can't be imported: {type(error).__name__}: {error}\n{where}"


def bundle_files(path: Path, include: tuple[str, ...]) -> list[Path]:
    root = path.parent.resolve()
    files = {path.resolve()}
    for entry in include:
        target = (root / entry).resolve()
        if not target.is_relative_to(root) or not target.exists():
            raise InvalidSpec(f"include={entry!r} is not a file or folder under {root}")
        files.update(p for p in ([target] if target.is_file() else target.rglob("*")) if p.is_file())
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


def deploy(path: Path, client: Client) -> list[dict[str, Any]]:
    """Deploys every app in the file, each in one step; returns the gateway's records of their functions."""
    return [record for app in load_apps(path) for record in deploy_app(app, path, client)["functions"]]


def deploy_app(app: App, path: Path, client: Client) -> dict[str, Any]:
    specs = list(app.functions.values())
    if any(spec.kind == "python" for spec in specs):
        bundle = make_bundle(path, app.include)
        client.request("PUT", f"/v1/bundles/{bundle.digest}", content=bundle.data)
        specs = [replace(spec, code=bundle.digest) if spec.kind == "python" else spec for spec in specs]
    return client.request("PUT", f"/v1/apps/{app.name}", json={"functions": [spec.to_dict() for spec in specs]})
