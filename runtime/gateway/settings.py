"""What a gateway process needs to know. The command line fills it in; nothing here reads the environment."""

import uuid
from dataclasses import dataclass, field

from stoker.runtime.webhooks.address import Network
from stoker.runtime.webhooks.schedule import PAUSES_S

MIB = 1 << 20


def new_gateway_id() -> str:
    return f"gateway-{uuid.uuid4().hex[:12]}"


@dataclass(frozen=True, slots=True)
class GatewaySettings:
    """`gateway_id` names the event channel: two living gateways must never share one.

    Sizes are bytes, times are seconds. `keepalive_s` is how long a stream may stay silent before a comment is sent, and
    so also how long a failure can still be answered with an HTTP status instead of an event in the stream. With a
    `keys_secret`, the deployment's, callers need a key; without, everyone who reaches the gateway is the operator.

    With a `secret`, the deployment's too, webhooks are signed and sent, to public addresses and to `webhook_networks`;
    tried again after `webhook_pauses_s`, each time within `webhook_lease_s`.

    When it is told to stop, calls that still wait after `drain_s` are answered without their result.
    """

    redis_url: str
    store_url: str
    keys_secret: str = field(default="", repr=False)
    secret: str = field(default="", repr=False)
    webhook_networks: tuple[Network, ...] = ()
    webhook_pauses_s: tuple[float, ...] = PAUSES_S
    webhook_lease_s: float = 60.0
    gateway_id: str = field(default_factory=new_gateway_id)
    max_body_bytes: int = 10 * MIB
    max_bundle_bytes: int = 50 * MIB
    max_file_bytes: int = 200 * MIB
    body_timeout_s: float = 30.0
    keepalive_s: float = 5.0
    drain_s: float = 25.0
