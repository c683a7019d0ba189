"""Making an app's version the deployed one: all of its functions change in one step, and its history with them."""

import asyncio
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from stoker.queue.cluster import Change
from stoker.runtime.gateway.auth import Caller
from stoker.runtime.gateway.context import Gateway
from stoker.runtime.gateway.deploy_routes import forget, keep_limits, remember
from stoker.runtime.gateway.errors import ApiError, not_found
from stoker.runtime.gateway.prompts import PromptEncoder
from stoker.runtime.gateway.registry import born_of
from stoker.runtime.gateway.router_uses import refuse_named
from stoker.runtime.releases import Release, Told, current, history, readable_releases, release_of, seen
from stoker.runtime.spec import FunctionSpec, full_name, owner_of, readable, short_name

Prepared = tuple[FunctionSpec, PromptEncoder | None]
Records = Mapping[str, dict[str, Any]]


class Made(NamedTuple):
    """`deleted`: the full names of functions that the app no longer has, `cancelled_jobs` how many jobs those had."""

    release: Release
    specs: list[FunctionSpec]
    deleted: list[str]
    cancelled_jobs: int


@dataclass(frozen=True, slots=True)
class Step:
    """What is to be made of whatever is deployed when it is taken. `whole`: functions of the app that are not among
    `specs` go; else they stay. `again`: a release of the past, which keeps its place in the history."""

    owner: str
    app: str
    specs: Sequence[FunctionSpec]
    by: str
    known: Told
    whole: bool
    again: Release | None = None


async def make_current(
    gateway: Gateway,
    caller: Caller,
    app: str,
    prepared: Sequence[Prepared],
    *,
    again: Release | None = None,
    whole: bool = True,
) -> Made:
    """Of two deployments at the same time the later one stands, all of it. Raises ApiError 409 for another app's
    function."""
    step = Step(caller.owner, app, [spec for spec, _ in prepared], who(caller), await told(gateway), whole, again)
    for spec, encoder in prepared:
        await remember(gateway, spec, encoder)
    made: list[tuple[Release, list[FunctionSpec], Change]] = []

    def decide(functions: Records, releases: Records) -> Change:
        made.append(taken(step, functions, releases, time.time()))
        return made[-1][2]

    try:
        await gateway.registry.change(full_name(caller.owner, app), decide)
    finally:
        for spec in step.specs:
            await keep_limits(gateway, spec.name)
    release, specs, change = made[-1]
    return Made(release, specs, change.delete, await forget_all(gateway, change.delete))


async def remove(gateway: Gateway, caller: Caller, app: str) -> tuple[list[str], int]:
    """The full names of the app's functions, which all go in one step, and how many jobs of theirs are cancelled. Its
    versions stay for a while, to go back to. Raises ApiError 404, and 409 while another app's router names one of them.
    """
    known, change = await told(gateway), Change({})

    def decide(functions: Records, releases: Records) -> Change:
        nonlocal change
        change = removed(caller.owner, app, functions, releases, known)
        return change

    await gateway.registry.change(full_name(caller.owner, app), decide)
    return change.delete, await forget_all(gateway, change.delete)


def removed(owner: str, app: str, functions: Records, releases: Records, known: Told) -> Change:
    deployed = readable(functions)
    mine = of_app(deployed.values(), owner, app)
    if not mine:
        raise not_found(f"There is no app '{app}' with functions.", code="app_not_found", param="name")
    refuse_named(deployed, [], list(mine))
    last = current(readable_releases(releases), {name: spec.version for name, spec in mine.items()})
    return Change({}, sorted(mine), {last.version: seen(last, known).to_dict()} if last else {})


async def forget_all(gateway: Gateway, functions: Iterable[str]) -> int:
    return sum(await asyncio.gather(*(forget(gateway, function) for function in functions)))


def taken(step: Step, functions: Records, releases: Records, now: float) -> tuple[Release, list[FunctionSpec], Change]:
    """The step, taken where these functions are deployed and these releases of the app are known. Raises ApiError 409
    for another app's function, and for one that would go while a router names it."""
    deployed = readable(functions)
    if step.whole:
        refuse_foreign(step.app, step.specs, deployed)
    mine = of_app(deployed.values(), step.owner, step.app)
    stay = {} if step.whole else mine
    wanted = {**stay, **{spec.name: spec for spec in step.specs}}
    specs = [replace(spec, born=born_of(functions.get(spec.name))) for spec in wanted.values()]
    known = readable_releases(releases)
    old = current(known, {name: spec.version for name, spec in mine.items()})
    new = step.again or release_of(specs, now, step.by)
    if old:
        old = seen(old, step.known)
        new = old if old.version == new.version else new
    changed, dropped = history(known, old, new, now, back=step.again is not None)
    put, deleted = {spec.name: spec.to_dict() for spec in specs}, sorted(mine.keys() - wanted.keys())
    refuse_named(deployed, specs, deleted)
    return new, specs, Change(put, deleted, changed, dropped)


def refuse_foreign(app: str, specs: Iterable[FunctionSpec], deployed: Mapping[str, FunctionSpec]) -> None:
    """Names are shared by all apps of a tenant, so one app must not replace another's function by accident."""
    for spec in specs:
        owner = deployed[spec.name].app if spec.name in deployed else app
        if owner != app:
            raise ApiError(
                409,
                f"Function '{short_name(spec.name)}' belongs to app '{owner}': choose another name, "
                "or delete it there first.",
                type="invalid_request_error",
                param="functions",
                code="function_exists",
            )


def of_app(specs: Iterable[FunctionSpec], owner: str, app: str) -> dict[str, FunctionSpec]:
    return {spec.name: spec for spec in specs if spec.app == app and owner_of(spec.name) == owner}


async def told(gateway: Gateway) -> Told:
    proven = {name: spec["version"] for name, spec in (await gateway.cluster.proven()).items()}
    ready: dict[str, list[str]] = {}
    for host in (await gateway.cluster.hosts()).values():
        for replica in host.body["replicas"].values():
            if replica["state"] == "ready":
                ready.setdefault(replica["function"], []).append(replica["version"])
    return Told(proven, (await gateway.cluster.fleet()).get("rollouts", {}), ready)


def who(caller: Caller) -> str:
    return f"{caller.tenant} (key {caller.key_id})" if caller.key_id else caller.tenant
