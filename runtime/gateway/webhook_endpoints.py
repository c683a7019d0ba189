"""The part of the route table that is about webhooks."""

from stoker.runtime.gateway import webhook_routes as routes
from stoker.runtime.gateway.endpoint import Endpoint

NO_JOB = {404: "There is no such job, or it has no webhook.", 410: "The job is no longer kept."}
SECRET, DELIVERIES = "/v1/webhooks/secret", "/v1/jobs/{id}/webhook-deliveries"

WEBHOOK_ENDPOINTS = [
    Endpoint(
        "GET",
        SECRET,
        routes.get_secret,
        "deploy",
        "The secret with which the caller's webhooks are signed (Standard Webhooks).",
        "Webhooks",
        answer=routes.SecretObject,
    ),
    Endpoint(
        "POST",
        f"{SECRET}/rotate",
        routes.rotate_secret,
        "deploy",
        "Make a new secret; the last one signs too for a while.",
        "Webhooks",
        request=routes.RotateSecretRequest,
        answer=routes.SecretObject,
    ),
    Endpoint(
        "GET",
        DELIVERIES,
        routes.list_deliveries,
        "invoke",
        "What became of the job's webhooks, try by try.",
        "Webhooks",
        answer=routes.DeliveryList,
        problems=NO_JOB,
    ),
    Endpoint(
        "POST",
        f"{DELIVERIES}/replay",
        routes.replay_delivery,
        "invoke",
        "Send the job's last webhook again, under the same `webhook-id`.",
        "Webhooks",
        answer=routes.DeliveryList,
        status=202,
        problems=NO_JOB,
    ),
]
