"""What a gateway process needs to know. The command line fills it in; nothing here reads the environment."""

import uuid
from dataclasses import dataclass, field

MIB = 1 << 20


def new_gateway_id() -> str:
    return f"gateway-{uuid.uuid4().hex[:12]}"


@dataclass(frozen=True, slots=True)
class GatewaySettings:
    """`gateway_id` names the event channel: two living gateways must never share one.

    Sizes are bytes, times are seconds. `keepalive_s` is how long a stream may stay silent before a comment is sent, and
    so also how long a failure can still be answered with an HTTP status instead of an event in the stream. With a
    `keys_secret`, the deployment's, callers need a key; without, everyone who reaches the gateway is the operator.
    """

    redis_url: str
    store_url: str
    keys_secret: str = field(default="", repr=False)
    gateway_id: str = field(default_factory=new_gateway_id)
    max_body_bytes: int = 10 * MIB
    max_bundle_bytes: int = 50 * MIB
    max_file_bytes: int = 200 * MIB
    body_timeout_s: float = 30.0
    keepalive_s: float = 5.0
