"""The webhook that a request asks for, in its header `Webhook-URL`, or that its function declares."""

from stoker.runtime.gateway.endpoint import Incoming
from stoker.runtime.gateway.errors import bad_request
from stoker.runtime.gateway.settings import GatewaySettings
from stoker.runtime.webhooks.address import may_receive
from stoker.runtime.webhooks.target import InvalidTarget, is_address, target_of

HEADER = "Webhook-URL"
WEBHOOK = {HEADER: "Is told how the job ended: a POST that is signed as Standard Webhooks says."}


def webhook_url(incoming: Incoming, declared: str) -> str:
    """The header's, else the `declared` one, "" for none. Raises ApiError 400 for one that could never be called."""
    url = incoming.headers.get(HEADER.lower(), "").strip()
    if url:
        check_webhook(incoming.gateway.settings, url, HEADER)
    return url or declared


def check_webhook(settings: GatewaySettings, url: str, param: str) -> None:
    """What a host's name leads to is only known when it is called."""
    try:
        host = target_of(url).host
    except InvalidTarget as problem:
        raise bad_request(f"{param}: {problem}.", param=param, code="invalid_webhook_url") from None
    if is_address(host) and not may_receive(host, settings.webhook_networks):
        message = f"{param}: '{host}' is not a public address (see STOKER_WEBHOOK_ALLOW)."
        raise bad_request(message, param=param, code="invalid_webhook_url")
    check_signing(settings, param)


def check_signing(settings: GatewaySettings, param: str) -> None:
    if not settings.secret:
        message = "Webhooks can't be signed here: this gateway was started without the deployment's STOKER_SECRET."
        raise bad_request(message, code="webhooks_unavailable", param=param)
