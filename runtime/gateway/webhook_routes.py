"""A tenant's webhook secret, and what became of the webhooks of a job."""

from typing import Literal

from starlette.responses import Response
from typing_extensions import TypedDict

from stoker.queue.deliveries import Delivery, Status, Try
from stoker.queue.records import made_at_ms
from stoker.runtime.gateway.endpoint import Incoming, Json
from stoker.runtime.gateway.errors import bad_request, not_found
from stoker.runtime.gateway.job_routes import job_not_found, own_job
from stoker.runtime.gateway.webhook_body import event_type
from stoker.runtime.gateway.webhook_runner import webhook_id
from stoker.runtime.gateway.webhook_url import check_signing
from stoker.runtime.webhooks.secret_shelf import Secrets

OVERLAP_S = 86_400.0
MOST_OVERLAP_S = 30 * 86_400
MOST_LIVES = 32


class TryObject(TypedDict):
    """`at` is unix seconds; `status` is null when there was no answer, for the reason in `error`."""

    at: float
    seconds: float
    status: int | None
    error: str | None


class DeliveryObject(TypedDict):
    """`id` is sent as `webhook-id`."""

    object: Literal["webhook_delivery"]
    id: str
    job: str
    type: str
    url: str
    status: Status
    tries: list[TryObject]


class DeliveryList(TypedDict):
    object: Literal["list"]
    data: list[DeliveryObject]


class SecretObject(TypedDict):
    """`previous` signs too, until `previous_until` (unix seconds)."""

    object: Literal["webhook_secret"]
    secret: str
    previous: str | None
    previous_until: float | None


class RotateSecretRequest(TypedDict, total=False):
    overlap_s: float


async def get_secret(incoming: Incoming) -> Response:
    check_signing(incoming.gateway.settings, "secret")
    return Json(secret_object(await incoming.gateway.webhooks.secrets_of(incoming.caller.tenant)))


async def rotate_secret(incoming: Incoming) -> Response:
    fields = incoming.object() if incoming.body else {}
    overlap_s = fields.get("overlap_s", OVERLAP_S)
    number = isinstance(overlap_s, int | float) and not isinstance(overlap_s, bool)
    if set(fields) - {"overlap_s"} or not number or not 0 <= overlap_s <= MOST_OVERLAP_S:
        message = f"The body may have 'overlap_s', a number of seconds from 0 to {MOST_OVERLAP_S}."
        raise bad_request(message, param="overlap_s")
    check_signing(incoming.gateway.settings, "secret")
    return Json(secret_object(await incoming.gateway.webhooks.rotate(incoming.caller.tenant, overlap_s)))


async def list_deliveries(incoming: Incoming) -> Response:
    return Json(delivery_list(await own_deliveries(incoming)))


async def replay_delivery(incoming: Incoming) -> Response:
    """Sends the job's last webhook again, now and with all its tries; the receiver sees the same `webhook-id`."""
    found = await own_deliveries(incoming)
    if not found:
        raise not_found("This job has no webhook, or it is no longer kept.", code="no_webhook", param="id")
    last, _ = found[-1]
    await incoming.gateway.webhooks.enable(last.tenant, last.url)
    await incoming.gateway.deliveries.again(last.id)
    return Json(delivery_list(await own_deliveries(incoming)), status_code=202)


async def own_deliveries(incoming: Incoming) -> list[tuple[Delivery, list[Try]]]:
    """Of the caller's job, whose record may be gone already. Raises ApiError 404 and 410 for a job without any."""
    job_id, account = incoming.path("id"), incoming.caller.account
    try:
        made_ms = made_at_ms(job_id)
        found = await incoming.gateway.deliveries.of_job(job_id, MOST_LIVES)
    except ValueError:
        raise job_not_found(job_id) from None
    if not any(delivery.tenant == account.name for delivery, _ in found) or made_ms < int(account.created_at * 1000):
        await own_job(incoming)
        return []
    return found


def delivery_list(found: list[tuple[Delivery, list[Try]]]) -> DeliveryList:
    return {"object": "list", "data": [delivery_object(*each) for each in found]}


def delivery_object(delivery: Delivery, tries: list[Try]) -> DeliveryObject:
    return {
        "object": "webhook_delivery",
        "id": webhook_id(delivery),
        "job": delivery.job_id,
        "type": event_type(delivery),
        "url": delivery.url,
        "status": delivery.status,
        "tries": [try_object(each) for each in tries],
    }


def try_object(what: Try) -> TryObject:
    return {"at": what.at, "seconds": what.seconds, "status": what.status or None, "error": what.error or None}


def secret_object(secrets: Secrets) -> SecretObject:
    return {
        "object": "webhook_secret",
        "secret": secrets.current,
        "previous": secrets.previous or None,
        "previous_until": secrets.previous_until or None,
    }
