"""Names that a user's modules can't have: in a worker they would stand in for the modules that it needs itself."""

import re
import sys
from functools import cache
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

from stoker.runtime.requirement import InvalidSpec

OURS = "stoker"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
RUNS = re.compile(r"[-_.]+")


def check_module_name(file: str, module: str) -> None:
    """`file`: what the user calls it. Raises InvalidSpec."""
    if module in sys.stdlib_module_names:
        raise InvalidSpec(f"{file} has the name of Python's own module {module!r}: rename it")
    if module == OURS or module in modules_needed():
        raise InvalidSpec(f"{file} has the name of {module!r}, a package that stoker needs: rename it")


def module_of(path: Path) -> str:
    """What a file of a bundle is imported as, by its path in it; "" for none, or for a part of a package."""
    if len(path.parts) == 2 and path.name == "__init__.py":
        return path.parts[0]
    return path.stem if len(path.parts) == 1 and path.suffix == ".py" else ""


@cache
def modules_needed() -> frozenset[str]:
    needed = distributions_needed(OURS, set())
    return frozenset(
        module
        for module, owners in packages_distributions().items()
        if any(canonical(owner) in needed for owner in owners)
    )


def distributions_needed(name: str, known: set[str]) -> set[str]:
    """Those that one needs, directly or not, and that are installed."""
    try:
        wanted = requires(name) or []
    except PackageNotFoundError:
        return known
    for requirement in wanted:
        found = NAME.match(requirement)
        if found and "extra ==" not in requirement and canonical(found[0]) not in known:
            known.add(canonical(found[0]))
            distributions_needed(found[0], known)
    return known


def canonical(name: str) -> str:
    return RUNS.sub("-", name).lower()
