"""Changes are noted in the audit log; GET /v1/audit reads and checks it."""

from dataclasses import replace
from typing import Literal

from starlette.responses import Response
from typing_extensions import TypedDict

from stoker.queue.retry import insist
from stoker.runtime.gateway.endpoint import Endpoint, Handler, Incoming, Json

PAGE, MOST_PER_PAGE = 100, 10_000
PATIENCE_S = 2.0


class AuditEntry(TypedDict):
    """`action` is a method and a route, `target` what stood in its path, `key_id` "" where no keys are asked for,
    `before` the digest of the entry before."""

    number: int
    at: float
    tenant: str
    key_id: str
    action: str
    target: dict[str, str]
    status: int
    before: str
    digest: str


class AuditList(TypedDict):
    """The newest first. `first_broken` is the number of the first entry that was altered, removed or put in, else 0."""

    object: Literal["list"]
    data: list[AuditEntry]
    first_broken: int


async def list_audit(incoming: Incoming) -> Response:
    entries, broken = await incoming.gateway.audit.read(incoming.limit(PAGE, MOST_PER_PAGE))
    return Json({"object": "list", "data": [entry.to_dict() for entry in entries], "first_broken": broken})


def audited(endpoint: Endpoint) -> Endpoint:
    """What changes the deployment is on record once it is answered; an answer that can't be recorded is an error."""
    if endpoint.access not in ("admin", "deploy") or endpoint.method == "GET":
        return endpoint
    return replace(endpoint, handler=noting(endpoint.handler, f"{endpoint.method} {endpoint.path}"))


def noting(handler: Handler, action: str) -> Handler:
    async def handle(incoming: Incoming) -> Response:
        response = await handler(incoming)
        caller, target = incoming.caller, dict(incoming.scope["path_params"])
        told = (caller.tenant, caller.key_id, action, target, response.status_code)
        await insist(lambda: incoming.gateway.audit.note(*told), PATIENCE_S)
        return response

    return handle


AUDIT_ENDPOINTS = [
    Endpoint(
        "GET",
        "/v1/audit",
        list_audit,
        "admin",
        "Who changed what, and whether the record is whole.",
        "Tenants",
        answer=AuditList,
        asks={"limit": "At most so many, 1 to 10,000; 100 if left out."},
    ),
]
