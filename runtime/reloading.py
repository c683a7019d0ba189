"""`stoker up --reload FILE`: deploys an app's file again whenever it, or what it includes, changes.

Each deployment is a process of its own, so that the file and its modules are imported anew and whatever they do ends
with it. A file that is broken is told; what was deployed before serves on.
"""

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from watchfiles import awatch

from stoker.runtime.processes import die_with_parent, parent_mark

MODULE = "stoker.runtime.reloading"
INCLUDES = "stoker includes: "
DEBOUNCE_MS, STEP_MS = 400, 50
# Where the system doesn't tell of changes, as on some network drives, they are seen so often.
LOOK_MS = 1000
# So long after a change a deployment may still end by itself, for an import that writes into its own folder.
END_WITHIN_S = 3.0

Snapshot = dict[Path, tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Watched:
    """An app's file and what it includes; `all`: the Python files in its folder too, as its import doesn't succeed and
    can't tell what it includes now."""

    file: Path
    includes: frozenset[Path] = frozenset()
    all: bool = True

    def files(self) -> set[Path]:
        return files_of({self.file, *self.includes}) | set(python_files(self.file.parent) if self.all else ())

    def folders(self) -> set[Path]:
        return folders_of({self.file, *self.includes}) | {path.parent for path in self.files()}


def files_of(paths: Iterable[Path]) -> set[Path]:
    inside = (found for path in paths for found in ([path] if path.is_file() else path.rglob("*")))
    return {path for path in inside if path.is_file() and "__pycache__" not in path.parts}


def python_files(folder: Path) -> Iterator[Path]:
    """Without those of virtual environments and hidden folders."""
    for place, inside, names in os.walk(folder):
        paths = {name: Path(place) / name for name in (*inside, *names)}
        inside[:] = [name for name in inside if name[0] != "." and not (paths[name] / "pyvenv.cfg").exists()]
        yield from (paths[name] for name in names if name.endswith(".py"))


def snapshot(files: Iterable[Path]) -> Snapshot:
    """Size and time of the last change of each file; one that is being replaced is not there."""
    found: Snapshot = {}
    for path in files:
        with contextlib.suppress(OSError):
            facts = path.stat()
            found[path] = (facts.st_mtime_ns, facts.st_size)
    return found


def folders_of(paths: Iterable[Path]) -> set[Path]:
    """Those whose entries tell of a change: editors replace a file, which ends a watch on the file itself."""
    inside = {folder for path in paths for folder in path.rglob("*") if folder.is_dir()}
    return {folder for path in paths for folder in (path, path.parent) if folder.is_dir()} | inside


async def keep_deployed(file: Path, environment: dict[str, str]) -> None:
    """Until it is cancelled. `environment` names the gateway and a key for it."""
    watched = Watched(file)
    while True:
        began, before = time.time_ns(), snapshot(watched.files())
        if ended := await deployed(watched, before, environment):
            watched = ended
            await changed(watched, as_deployed(before, watched.files(), began))
        print(f"{file.name} changed: deploying it", flush=True)


def as_deployed(before: Snapshot, files: set[Path], began: int) -> Snapshot:
    """These files as they were when the deployment began, at that time in nanoseconds. Of one that nobody had looked at
    then, all that is known is that it hasn't been written since; else it is left out, and so found to be changed."""
    unseen = {path: facts for path, facts in snapshot(files - before.keys()).items() if facts[0] < began}
    return {**unseen, **{path: facts for path, facts in before.items() if path in files}}


async def deployed(watched: Watched, before: Snapshot, environment: dict[str, str]) -> Watched | None:
    """What is to be watched from now on. None when files changed and the deployment, or the import in it, still runs a
    while later: it is killed, for it may never end."""
    deployment = asyncio.create_task(deploy(watched, environment))
    change = asyncio.create_task(changed(watched, before))
    try:
        await asyncio.wait({deployment, change}, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.wait({deployment}, timeout=END_WITHIN_S)
        return deployment.result() if deployment.done() else None
    finally:
        deployment.cancel()
        change.cancel()
        await asyncio.gather(deployment, change, return_exceptions=True)


async def changed(watched: Watched, before: Snapshot) -> None:
    """Until the files differ; also from changes that came before this was called."""
    options = {"debounce": DEBOUNCE_MS, "step": STEP_MS, "rust_timeout": LOOK_MS, "yield_on_timeout": True}
    async with contextlib.aclosing(awatch(*watched.folders(), recursive=False, **options)) as looks:
        async for _ in looks:
            if snapshot(watched.files()) != before:
                return


async def deploy(watched: Watched, environment: dict[str, str]) -> Watched:
    """What is to be watched after it. The deployment's own words and its errors go where this process's go."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", MODULE, str(watched.file)),
        env={**environment, **parent_mark(os.getpid()), "PYTHONDONTWRITEBYTECODE": "1"},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        output, _ = await process.communicate()
    except asyncio.CancelledError:
        process.kill()
        raise
    said, told, includes = output.decode(errors="replace").rpartition(INCLUDES)
    print(said if told else includes, end="", flush=True)
    if not told:
        return replace(watched, all=True)
    paths = frozenset(Path(path) for path in includes.strip().split(os.pathsep) if path)
    return Watched(watched.file, paths, all=False)


def main() -> int:
    """The process that deploys. The last line that it writes tells what the app includes, if it could be imported."""
    from stoker.runtime.client.client import Client
    from stoker.runtime.commands.exits import run
    from stoker.runtime.deployment import deploy_app, load_apps

    file = Path(sys.argv[1])
    includes: list[str] | None = None

    def deploy_all() -> None:
        nonlocal includes
        apps = load_apps(file)
        includes = [str((file.parent / entry).resolve()) for app in apps for entry in app.include]
        with Client() as client:
            for app in apps:
                for record in deploy_app(app, file, client, lambda done, total: None)["functions"]:
                    print(f"deployed {record['name']} (version {record['version']})")

    code = run(deploy_all)
    if includes is not None:
        print(INCLUDES + os.pathsep.join(includes), flush=True)
    return code


if __name__ == "__main__":
    die_with_parent()
    sys.exit(main())
