"""What is remembered of an app's versions: which functions each had, who deployed it when, and what became of it.

An app's version has the version of its only function, or else a name made from those of all.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from stoker.runtime.spec import FunctionSpec, short_name

# An untried version was never started; a proven one was ready once; one that failed never was, and fails to start.
Fate = Literal["untried", "proven", "failed"]
State = Literal["serving"] | Fate

MOST_KEPT = 20
VERSION_DIGITS = 12


@dataclass(frozen=True, slots=True)
class Told:
    """What the cluster tells of functions, by full name: the version that was ready last; and of a newest version that
    fails to start, its own name, the one that serves meanwhile ("": none) and the error; the versions of the replicas
    that take calls."""

    proven: Mapping[str, str] = field(default_factory=dict)
    failing: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    ready: Mapping[str, Sequence[str]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Release:
    """`specs` are the functions' records by full name; `fates` and `errors` are what was last known of them.
    `deployed_at` is in unix seconds, and so is `in_force_at`: when it was deployed or gone back to last (0: before that
    was kept). `line` has the versions that were in force before it, the oldest first, less those that were gone back
    from since (None: not kept then)."""

    version: str
    specs: Mapping[str, Mapping[str, Any]]
    deployed_at: float
    by: str
    fates: Mapping[str, Fate] = field(default_factory=dict)
    errors: Mapping[str, str] = field(default_factory=dict)
    in_force_at: float = 0.0
    line: Sequence[str] | None = None

    def to_dict(self) -> dict[str, Any]:
        names = ("specs", "deployed_at", "by", "fates", "errors", "in_force_at", "line")
        return {name: getattr(self, name) for name in names}

    @property
    def since(self) -> float:
        return self.in_force_at or self.deployed_at

    @property
    def versions(self) -> dict[str, str]:
        return {name: spec["version"] for name, spec in self.specs.items()}

    @property
    def fate(self) -> Fate:
        fates = set(self.fates.values())
        return "failed" if "failed" in fates else "proven" if "proven" in fates else "untried"


def readable_releases(records: Mapping[str, Mapping[str, Any]]) -> list[Release]:
    """The newest first."""
    found = [Release(version, **record) for version, record in records.items()]
    return sorted(found, key=lambda release: release.deployed_at, reverse=True)


def release_of(specs: Iterable[FunctionSpec], now: float, by: str) -> Release:
    records = {spec.name: spec.to_dict() for spec in specs}
    return Release(version_name({name: record["version"] for name, record in records.items()}), records, now, by)


def version_name(versions: Mapping[str, str]) -> str:
    if len(versions) == 1:
        return next(iter(versions.values()))
    parts = "\n".join(f"{short_name(name)} {version}" for name, version in sorted(versions.items()))
    return hashlib.sha256(parts.encode()).hexdigest()[:VERSION_DIGITS]


def current(releases: Iterable[Release], deployed: Mapping[str, str]) -> Release | None:
    """The release whose functions, in their versions, are those that are deployed."""
    return next((release for release in releases if release.versions == deployed), None)


def seen(release: Release, told: Told) -> Release:
    """With what is known of it by now. Only the deployed version's start can be known to fail; what was proven once
    stays so, and a router has nothing to start."""
    fates: dict[str, Fate] = dict(release.fates)
    errors = dict(release.errors)
    for name, version in release.versions.items():
        failing = told.failing.get(name, {})
        if told.proven.get(name) == version or release.specs[name].get("kind") == "router":
            fates[name] = "proven"
            errors.pop(name, None)
        elif failing.get("version") == version and fates.get(name) != "proven":
            fates[name], errors[name] = "failed", failing["error"]
        else:
            fates.setdefault(name, "untried")
    return replace(release, fates=fates, errors=errors)


def serves_instead(release: Release, told: Told) -> bool:
    """Whether a function of it is woken in place of a newer version that fails to start."""
    return any(told.failing.get(name, {}).get("serving") == version for name, version in release.versions.items())


def state_of(release: Release, told: Told, *, is_current: bool) -> State:
    fate = seen(release, told).fate if is_current else release.fate
    serving = fate == "proven" if is_current else serves_instead(release, told)
    return "serving" if serving else fate


def line_to(releases: Iterable[Release], last: Release) -> list[str]:
    """The versions that were in force before it and may be gone back to, the oldest first."""
    if last.line is not None:
        return list(last.line)
    older = [release for release in releases if release.deployed_at < last.deployed_at]
    return [release.version for release in sorted(older, key=lambda release: release.deployed_at)]


def path_to(releases: list[Release], now: Release | None) -> list[str]:
    """As `line_to`, with the current one at its end; where none is current (a function was deleted since), the one that
    was so last."""
    last = now or max(releases, key=lambda release: release.since, default=None)
    return [*line_to(releases, last), last.version] if last else []


def before(releases: list[Release], now: Release | None) -> Release | None:
    """What a rollback goes back to: what was in force before the current one and didn't fail to start. What was gone
    back from is not gone forward to."""
    by_version = {release.version: release for release in releases if now is None or release.version != now.version}
    older = [by_version[version] for version in reversed(path_to(releases, now)) if version in by_version]
    return next((release for release in older if release.fate != "failed"), None)


def in_force(releases: list[Release], old: Release | None, new: Release, now: float, *, back: bool) -> Release:
    """`new` as it takes the place of `old`. `back`: it is gone back to, so what came after it is in its line no more.
    What is in force already stays as it is."""
    if old and old.version == new.version:
        return new
    path = path_to(releases, old)
    if back and new.version in path:
        path = path[: path.index(new.version)]
    kept = {release.version for release in releases} - {new.version}
    return replace(new, in_force_at=now, line=[version for version in path if version in kept])


def named(releases: Iterable[Release], version: str) -> list[Release]:
    """By its name or the beginning of it."""
    found = [release for release in releases if release.version.startswith(version)]
    return [release for release in found if release.version == version] or found


def history(
    known: list[Release], old: Release | None, new: Release, now: float, *, back: bool = False
) -> tuple[dict[str, Any], list[str]]:
    """When `new` takes the place of `old`: the records to write, and the versions to drop. Content that was deployed
    before is the same version; deployed again, it is the newest. What the next rollback goes to is kept."""
    releases = {release.version: release for release in (*known, *filter(None, [old]))}
    if known_before := releases.get(new.version):
        new = replace(new, fates=known_before.fates, errors=known_before.errors)
    new = releases[new.version] = in_force(list(releases.values()), old, new, now, back=back)
    changed = {release.version: release.to_dict() for release in (old, new) if release}
    target = before(list(releases.values()), new)
    kept = {*changed, target.version if target else ""}
    ranked = sorted(releases.values(), key=lambda release: (release.version in kept, release.since), reverse=True)
    return changed, [release.version for release in ranked[MOST_KEPT:]]
