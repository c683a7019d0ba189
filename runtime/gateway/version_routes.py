"""An app's versions: listed, and gone back to."""

from typing import Any, Literal, NotRequired

from starlette.responses import Response
from typing_extensions import TypedDict

from stoker.runtime.gateway.app_routes import AppObject, app_object
from stoker.runtime.gateway.deploy_routes import prepare
from stoker.runtime.gateway.endpoint import Endpoint, Incoming, Json
from stoker.runtime.gateway.errors import ApiError, bad_request, not_found
from stoker.runtime.gateway.releasing import make_current, of_app, refuse_foreign, told
from stoker.runtime.gateway.routing import check_routers
from stoker.runtime.releases import (
    Fate,
    Release,
    State,
    Told,
    before,
    current,
    named,
    readable_releases,
    seen,
    state_of,
)
from stoker.runtime.spec import FunctionSpec, InvalidSpec, full_name, short_name


class VersionPart(TypedDict):
    """One function of a version; `error` is why its last start failed, `others` counts the replicas of other versions
    that still take calls."""

    name: str
    version: str
    state: Fate
    error: str | None
    others: int


class VersionObject(TypedDict):
    """`current`: it is what was deployed last or gone back to. `state`: it serves; or it was ready once (`proven`),
    never was ready and fails to start (`failed`), or was never started (`untried`). `deployed_at` is in unix seconds;
    `by` is the tenant and its key's id."""

    object: Literal["app.version"]
    version: str
    current: bool
    state: State
    deployed_at: float
    by: str
    functions: list[VersionPart]


class VersionList(TypedDict):
    """The newest first."""

    object: Literal["list"]
    data: list[VersionObject]


class RollbackRequest(TypedDict):
    """`version`: its name or the beginning of it, else the one that was in force before the current one: a rollback
    changes what is in force, so what was gone back from is not gone forward to; what failed to start is passed over."""

    version: NotRequired[str]


async def list_versions(incoming: Incoming) -> Response:
    releases, now, known = await look(incoming)
    rows = [version_object(release, known, is_current=release is now) for release in releases]
    return Json({"object": "list", "data": rows})


async def rollback(incoming: Incoming) -> Response:
    """Deploys an older version again, as it was."""
    name, gateway, caller = incoming.path("name"), incoming.gateway, incoming.caller
    releases, now, _ = await look(incoming)
    target = target_of(name, releases, now, incoming.object() if incoming.body else {})
    specs = specs_of(target)
    check_routers(specs, await gateway.registry.visible(caller))
    refuse_foreign(name, specs, await gateway.registry.all())
    prepared = [await prepare(gateway, spec) for spec in specs]
    return Json(await app_object(gateway, name, await make_current(gateway, caller, name, prepared, again=target)))


async def look(incoming: Incoming) -> tuple[list[Release], Release | None, Told]:
    """The caller's app's versions, the current one and what the cluster tells of it. Raises ApiError 404."""
    name, gateway, owner = incoming.path("name"), incoming.gateway, incoming.caller.owner
    releases = [] if "." in name else readable_releases(await gateway.cluster.releases(full_name(owner, name)))
    if not releases:
        raise not_found(f"There is no app '{name}' with versions.", code="app_not_found", param="name")
    deployed = of_app((await gateway.registry.all()).values(), owner, name)
    now = current(releases, {full: spec.version for full, spec in deployed.items()})
    return releases, now, await told(gateway)


def target_of(app: str, releases: list[Release], now: Release | None, body: dict[str, Any]) -> Release:
    """Raises ApiError 400 for a wrong request, 404 for an unknown version, 409 where there is nothing to go back to."""
    version = body.get("version", "")
    if not isinstance(version, str):
        raise bad_request("'version' must be the name of a version.", param="version")
    if not version:
        if found := before(releases, now):
            return found
        raise ApiError(
            409,
            f"App '{app}' has no version before the current one to go back to.",
            type="invalid_request_error",
            param="version",
            code="no_earlier_version",
        )
    match named(releases, version):
        case [found]:
            return found
        case []:
            raise not_found(f"App '{app}' has no version '{version}'.", code="version_not_found", param="version")
    raise bad_request(f"Several versions of app '{app}' begin with '{version}'.", param="version")


def specs_of(release: Release) -> list[FunctionSpec]:
    try:
        return [FunctionSpec.from_dict(dict(spec)) for spec in release.specs.values()]
    except InvalidSpec as error:
        raise bad_request(
            f"Version '{release.version}' was deployed with another release of stoker ({error}); "
            "deploy it from its file.",
            param="version",
            code="invalid_spec",
        ) from None


def version_object(release: Release, known: Told, *, is_current: bool) -> VersionObject:
    shown = seen(release, known) if is_current else release
    return {
        "object": "app.version",
        "version": release.version,
        "current": is_current,
        "state": state_of(release, known, is_current=is_current),
        "deployed_at": release.deployed_at,
        "by": release.by,
        "functions": [
            {
                "name": short_name(name),
                "version": version,
                "state": shown.fates.get(name, "untried"),
                "error": shown.errors.get(name),
                "others": sum(other != version for other in known.ready.get(name, ())),
            }
            for name, version in release.versions.items()
        ],
    }


VERSION_ENDPOINTS = [
    Endpoint(
        "GET",
        "/v1/apps/{name}/versions",
        list_versions,
        "invoke",
        "The last versions of an app, the newest first, and what became of them.",
        "Functions",
        answer=VersionList,
        problems={404: "The caller has no such app."},
    ),
    Endpoint(
        "POST",
        "/v1/apps/{name}/rollback",
        rollback,
        "deploy",
        "Deploy an older version of an app again: all of its functions at once; running jobs end on their version.",
        "Functions",
        request=RollbackRequest,
        answer=AppObject,
        problems={
            404: "The caller has no such app, or it has no such version.",
            409: "There is no version to go back to, another app has a function of that name now, or a router names "
            "one that would go.",
        },
    ),
]
