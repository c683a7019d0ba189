"""Values that functions get as environment variables; what was stored is never shown again."""

from typing import Literal

from starlette.responses import Response
from typing_extensions import TypedDict

from stoker.runtime.gateway.context import Gateway
from stoker.runtime.gateway.endpoint import Endpoint, Incoming, Json
from stoker.runtime.gateway.errors import ApiError, bad_request, not_found
from stoker.runtime.spec import FunctionSpec, InvalidSpec, check_environment, owner_of, short_name, variable_of

MOST_BYTES = 32 << 10
MOST_SECRETS = 100


class SecretRequest(TypedDict):
    value: str


class SecretObject(TypedDict):
    """`variable` is its name in a function's environment; `set_at` Unix seconds."""

    object: Literal["secret"]
    name: str
    variable: str
    set_at: float


class SecretList(TypedDict):
    object: Literal["list"]
    data: list[SecretObject]


class DeletedSecret(TypedDict):
    object: Literal["secret"]
    name: str
    deleted: Literal[True]


async def list_secrets(incoming: Incoming) -> Response:
    names = await incoming.gateway.vault.names(incoming.caller.owner)
    return Json({"object": "list", "data": [secret_object(name, set_at) for name, set_at in names.items()]})


async def put_secret(incoming: Incoming) -> Response:
    """Stores a value, or another one; functions that run go on with what they have."""
    name, vault, owner = incoming.path("name"), incoming.gateway.vault, incoming.caller.owner
    value = secret_value(name, incoming.object().get("value"))
    if not vault.usable:
        raise ApiError(
            409,
            "This gateway has no secret to encrypt with: start it with STOKER_SECRET, at least 16 random characters.",
            code="no_deployment_secret",
        )
    known = await vault.names(owner)
    if name not in known and len(known) >= MOST_SECRETS:
        raise bad_request(f"There are {MOST_SECRETS} secrets: delete some first.", code="too_many_secrets")
    created = await vault.put(owner, name, value)
    set_at = (await vault.names(owner))[name]
    return Json(secret_object(name, set_at), status_code=201 if created else 200)


async def delete_secret(incoming: Incoming) -> Response:
    name, gateway, owner = incoming.path("name"), incoming.gateway, incoming.caller.owner
    functions = (await gateway.registry.all()).values()
    if users := [short_name(each.name) for each in functions if owner_of(each.name) == owner and name in each.secrets]:
        message = f"Secret '{name}' is used by {', '.join(sorted(users))}: deploy without it first."
        raise ApiError(409, message, code="secret_in_use", param="name")
    if not await gateway.vault.remove(owner, name):
        raise not_found(f"There is no secret '{name}'.", code="secret_not_found", param="name")
    return Json({"object": "secret", "name": name, "deleted": True})


async def check_secrets(gateway: Gateway, spec: FunctionSpec) -> None:
    """That those of a function that is deployed are there. Raises ApiError 400."""
    if missing := await gateway.vault.missing(owner_of(spec.name), spec.secrets) if spec.secrets else []:
        name = missing[0]
        message = f"There is no secret '{name}': store it first, with `stoker secrets set {name}`."
        raise bad_request(message, param="spec.secrets", code="secret_not_found")


def secret_value(name: str, value: object) -> str:
    """Raises ApiError 400."""
    try:
        check_environment({}, (name,))
    except InvalidSpec as error:
        raise bad_request(f"{error}.", param="name", code="invalid_secret") from None
    if not isinstance(value, str) or not value or "\0" in value:
        raise bad_request("'value' must be text, without NUL characters.", param="value", code="invalid_secret")
    if len(value.encode(errors="replace")) > MOST_BYTES:
        raise bad_request(f"A secret has up to {MOST_BYTES >> 10} KiB.", param="value", code="invalid_secret")
    return value


def secret_object(name: str, set_at: float) -> SecretObject:
    return {"object": "secret", "name": name, "variable": variable_of(name), "set_at": set_at}


SECRET_ENDPOINTS = [
    Endpoint(
        "GET",
        "/v1/secrets",
        list_secrets,
        "deploy",
        "Names of the caller's secrets, never their values.",
        "Functions",
        answer=SecretList,
    ),
    Endpoint(
        "PUT",
        "/v1/secrets/{name}",
        put_secret,
        "deploy",
        "Store a secret for functions of the caller's.",
        "Functions",
        request=SecretRequest,
        answer=SecretObject,
        others={201: SecretObject},
        problems={404: "The name is empty.", 409: "The gateway has no secret of its own to encrypt with."},
    ),
    Endpoint(
        "DELETE",
        "/v1/secrets/{name}",
        delete_secret,
        "deploy",
        "Delete a secret that no deployed function uses.",
        "Functions",
        answer=DeletedSecret,
        problems={404: "There is no such secret.", 409: "A deployed function uses it."},
    ),
]
