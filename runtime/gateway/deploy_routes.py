"""Deploying: code bundles and functions."""

import asyncio
import hashlib
import json
import re
import tempfile
import time
import zipfile
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError
from starlette.responses import Response
from typing_extensions import TypedDict

from stoker.coldstart.failures import ColdStartError, ObjectMissing
from stoker.coldstart.store import ObjectInfo, ObjectStore
from stoker.queue.records import Backlog, Limits, pack
from stoker.runtime.adapters.published import AdapterRefused, check_adapters
from stoker.runtime.gateway.auth import Caller
from stoker.runtime.gateway.body import body_parts
from stoker.runtime.gateway.cluster_view import Snapshot
from stoker.runtime.gateway.context import Gateway
from stoker.runtime.gateway.endpoint import Incoming, Json
from stoker.runtime.gateway.errors import ApiError, bad_request, invalid_fields
from stoker.runtime.gateway.prompts import PromptEncoder
from stoker.runtime.gateway.registry import FRESH_S
from stoker.runtime.gateway.secret_routes import check_secrets
from stoker.runtime.gateway.waiting import replicas_of
from stoker.runtime.gateway.webhook_url import check_webhook
from stoker.runtime.logs.log_book import LogBook
from stoker.runtime.spec import FunctionSpec, InvalidSpec, check_name, full_name, owner_of, short_name

SHA256 = re.compile(r"[0-9a-f]{64}")
ENTRY = re.compile(r"[^\W\d][\w.]*:[^\W\d][\w.]*")
VERSION_DIGITS = 12
BUNDLE_TIMEOUT_S = 300.0
STOP_PATIENCE_S = 5.0
STOP_LOOK_S = 0.05
TAKES_WORK = {"starting", "loading", "ready"}
SPEC = TypeAdapter(FunctionSpec)


class BundleObject(TypedDict):
    object: Literal["bundle"]
    sha256: str
    bytes: int


class RolloutObject(TypedDict):
    """A `version` that fails to start, the older one that is `serving` meanwhile (null: none), and the last error."""

    version: str
    serving: str | None
    error: str


class FunctionObject(TypedDict):
    """`replicas` counts this function's replicas by state; `spec` is what was deployed. `owner` is the tenant that
    deployed it, "" for the operator's, which all tenants share; the operator finds tenants' listed as OWNER.NAME.
    `wait_reason` is null unless jobs wait for a replica, or a replica for a place. `rollout` is null unless this
    version was never ready and fails to start."""

    object: Literal["function"]
    name: str
    owner: str
    kind: str
    version: str
    queued: int
    running: int
    replicas: dict[str, int]
    wait_reason: str | None
    rollout: RolloutObject | None
    spec: dict[str, Any]


class FunctionList(TypedDict):
    object: Literal["list"]
    data: list[FunctionObject]


class DeletedFunction(TypedDict):
    """`cancelled_jobs`: how many of its jobs were queued or ran."""

    object: Literal["function"]
    name: str
    deleted: Literal[True]
    cancelled_jobs: int


class DeployRequest(TypedDict):
    spec: FunctionSpec


async def put_bundle(incoming: Incoming) -> Response:
    digest = incoming.path("sha256")
    if not SHA256.fullmatch(digest):
        raise bad_request("A bundle is named by its SHA-256: 64 lower-case hexadecimal digits.", param="sha256")
    gateway = incoming.gateway
    with tempfile.TemporaryDirectory(prefix="stoker-bundle-") as folder:
        path = Path(folder) / "bundle.zip"
        actual = await receive_file(incoming, path)
        if actual != digest:
            message = f"The body's SHA-256 is {actual}, not the {digest} of the URL."
            raise bad_request(message, param="sha256", code="digest_mismatch")
        if not await asyncio.to_thread(zipfile.is_zipfile, path):
            raise bad_request("The bundle is not a zip file.", code="invalid_bundle")
        info = await asyncio.to_thread(write_object, gateway.store, bundle_key(digest), path)
    return Json({"object": "bundle", "sha256": digest, "bytes": info.size}, status_code=201)


async def receive_file(incoming: Incoming, path: Path) -> str:
    """Writes the body to `path` as it comes; returns its SHA-256."""
    digest = hashlib.sha256()
    limit = incoming.gateway.settings.max_bundle_bytes
    with path.open("wb") as file:
        async for part in body_parts(incoming.scope, incoming.receive, limit, BUNDLE_TIMEOUT_S):
            digest.update(part)
            await asyncio.to_thread(file.write, part)
    return digest.hexdigest()


def write_object(store: ObjectStore, key: str, path: Path) -> ObjectInfo:
    try:
        return store.write(key, path)
    except ColdStartError as error:
        raise store_failure(error) from error


def store_failure(error: ColdStartError) -> ApiError:
    return ApiError(503, f"The object store failed: {error}.", type="server_error", code=type(error).__name__)


def bundle_key(digest: str) -> str:
    return f"bundles/{digest}.zip"


async def prepare(gateway: Gateway, spec: FunctionSpec) -> tuple[FunctionSpec, PromptEncoder | None]:
    """The spec with its version, once everything that it points at has been found. Raises ApiError 400."""
    encoder = await check_parts(gateway, spec)
    adapters = await check_adapters_of(gateway, spec)
    if encoder:
        spec = replace(spec, takes=f"{encoder.facts.tokens} {encoder.facts.context}")
    if not spec.version:
        revision = encoder.facts.revision if encoder else spec.code
        spec = replace(spec, version=version_of(spec, "".join([revision, *adapters])))
    return spec, encoder


async def remember(gateway: Gateway, spec: FunctionSpec, encoder: PromptEncoder | None) -> None:
    if encoder is not None:
        gateway.prompts.keep(spec, encoder)
    await gateway.broker.set_limits(spec.name, limits_of(spec))


async def keep_limits(gateway: Gateway, name: str) -> None:
    """Until the queue's limits are those of what is deployed, should others have deployed it at the same time."""
    set_last: Limits | None = None
    while record := await gateway.cluster.function(name):
        limits = limits_of(FunctionSpec.from_dict(record))
        if limits == set_last:
            return
        await gateway.broker.set_limits(name, limits)
        set_last = limits


def limits_of(spec: FunctionSpec) -> Limits:
    return Limits(**{field.name: getattr(spec.limits, field.name) for field in fields(Limits)})


async def spec_of(gateway: Gateway, caller: Caller, name: str, body: Mapping[str, Any]) -> FunctionSpec:
    """Under its full name. Raises ApiError 400 for a spec that can't work, naming the field where that is known."""
    fields = body.get("spec")
    if not isinstance(fields, dict):
        raise bad_request("The body must be an object with the function's 'spec'.", param="spec")
    if fields.get("name", name) != name:
        raise bad_request(f"The spec is named '{fields['name']}', the URL '{name}'.", param="spec.name")
    try:
        check_name(name)
        spec = SPEC.validate_json(json.dumps({**fields, "name": name, "born": ""}), strict=True)
        FunctionSpec.from_dict({**fields, "name": name})
        await gateway.inputs.check_schema(caller.tenant, spec.input_schema)
        return replace(spec, name=full_name(caller.owner, name))
    except InvalidSpec as error:
        raise bad_request(f"{error}.", param="spec", code="invalid_spec") from None
    except ValidationError as error:
        raise invalid_fields(error, "spec") from None


async def check_parts(gateway: Gateway, spec: FunctionSpec) -> PromptEncoder | None:
    """That what the spec points at exists and can be read; returns what was read of a language model or encoder."""
    if spec.webhook:
        check_webhook(gateway.settings, spec.webhook, "spec.webhook")
    if spec.kind == "router":
        return None
    if spec.kind == "python":
        return await check_code(gateway, spec)
    try:
        return await gateway.prompts.load(spec)
    except ColdStartError as error:
        raise bad_request(
            f"The weights can't be used: {error}.", param="spec.weights", code=type(error).__name__
        ) from None
    except ValueError as error:
        raise bad_request(f"{error}.", param="spec.weights", code="invalid_spec") from None


async def check_adapters_of(gateway: Gateway, spec: FunctionSpec) -> list[str]:
    """Their revisions. Raises ApiError 400."""
    if not spec.adapters:
        return []
    arguments = spec.weights, spec.adapters, spec.model.adapter_rank
    try:
        return await gateway.prompts.run(f"loads of {owner_of(spec.name)}", check_adapters, *arguments)
    except AdapterRefused as refused:
        raise bad_request(f"{refused}.", param="spec.adapters", code="invalid_adapter") from None


async def check_code(gateway: Gateway, spec: FunctionSpec) -> None:
    if not ENTRY.fullmatch(spec.entry):
        raise bad_request("'entry' must be 'module:attribute'.", param="spec.entry", code="invalid_spec")
    if not SHA256.fullmatch(spec.code):
        raise bad_request("'code' must be the SHA-256 of a bundle.", param="spec.code", code="invalid_spec")
    await check_secrets(gateway, spec)
    key = bundle_key(spec.code)
    try:
        await asyncio.to_thread(gateway.store.stat, key)
    except ObjectMissing:
        raise bad_request(
            f"There is no {key} in the store: send it with PUT /v1/bundles/{spec.code} first.",
            param="spec.code",
            code="ObjectMissing",
        ) from None
    except ColdStartError as error:
        raise store_failure(error) from error


def version_of(spec: FunctionSpec, revision: str) -> str:
    """The same spec over the same weights or code is the same version, so that deploying it again changes nothing."""
    return hashlib.sha256(pack([spec.to_dict(), revision])).hexdigest()[:VERSION_DIGITS]


async def list_functions(incoming: Incoming) -> Response:
    view = await incoming.gateway.view.snapshot()
    functions = await incoming.gateway.registry.listed(incoming.caller)
    rows = [{**function_object(spec, view), "name": name} for name, spec in functions.items()]
    return Json({"object": "list", "data": rows})


async def get_function(incoming: Incoming) -> Response:
    spec = await incoming.gateway.registry.find(incoming.caller, incoming.path("name"))
    return Json(function_object(spec, await incoming.gateway.view.snapshot()))


async def delete_function(incoming: Incoming) -> Response:
    """Removes the function; its replicas stop and its waiting jobs are cancelled."""
    gateway = incoming.gateway
    spec = await gateway.registry.own(incoming.caller, incoming.path("name"))
    await gateway.registry.delete(spec.name)
    answer: DeletedFunction = {
        "object": "function",
        "name": short_name(spec.name),
        "deleted": True,
        "cancelled_jobs": await forget(gateway, spec.name),
    }
    return Json(answer)


async def forget(gateway: Gateway, name: str) -> int:
    """Of a function that is not deployed any more: its jobs are cancelled and billed, its replicas stop. One that was
    deployed again meanwhile keeps them. Returns how many jobs there were."""
    if await gateway.cluster.function(name) is not None:
        return 0
    await gateway.ledger.expect(name)
    backlog = (await gateway.broker.backlogs([name]))[name]
    await gateway.broker.purge_function(name)
    gateway.background(forget_latecomers(gateway, name))
    await replicas_stopped(gateway, name)
    await LogBook(gateway.redis).forget(name)
    return backlog.queued + backlog.delayed + backlog.running


async def forget_latecomers(gateway: Gateway, name: str) -> None:
    """Jobs from gateways that took the function for deployed a moment longer, and that nobody would ever run."""
    await asyncio.sleep(2 * FRESH_S)
    if await gateway.cluster.function(name) is None:
        await gateway.broker.purge_function(name)
        await LogBook(gateway.redis).forget(name)


async def replicas_stopped(gateway: Gateway, name: str) -> None:
    """Until no replica of the function takes work, so that what is deployed next under its name never runs old code.
    A host that can't say so is waited for a moment only."""
    deadline = time.monotonic() + STOP_PATIENCE_S
    while time.monotonic() < deadline:
        hosts = [host.body for host in (await gateway.cluster.hosts()).values()]
        if not any(replica["state"] in TAKES_WORK for replica in replicas_of(hosts, name)):
            return
        await asyncio.sleep(STOP_LOOK_S)


def function_object(spec: FunctionSpec, view: Snapshot) -> FunctionObject:
    backlog = view.backlogs.get(spec.name) or Backlog(spec.name, 0, 0, 0, 0, 0.0, 0.0, 0)
    states = [replica["state"] for replica in replicas_of(view.hosts, spec.name)]
    return {
        "object": "function",
        "name": short_name(spec.name),
        "owner": owner_of(spec.name),
        "kind": spec.kind,
        "version": spec.version,
        "queued": backlog.queued + backlog.delayed,
        "running": backlog.running,
        "replicas": {state: states.count(state) for state in sorted(set(states))},
        "wait_reason": view.fleet.get("reasons", {}).get(spec.name, {}).get("message"),
        "rollout": rollout_object(spec, view),
        "spec": {**spec.to_dict(), "name": short_name(spec.name)},
    }


def rollout_object(spec: FunctionSpec, view: Snapshot) -> RolloutObject | None:
    """What was reported of an earlier version says nothing of this one."""
    told = view.fleet.get("rollouts", {}).get(spec.name)
    if not told or told["version"] != spec.version:
        return None
    return {"version": told["version"], "serving": told["serving"] or None, "error": told["error"]}
