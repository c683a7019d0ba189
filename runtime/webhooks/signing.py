"""Signatures of webhooks as Standard Webhooks wants them: `v1`, HMAC-SHA-256, one for each secret that is valid."""

import hashlib
import hmac
from base64 import b64encode
from collections.abc import Sequence
from datetime import UTC, datetime

from standardwebhooks.webhooks import Webhook

from stoker.runtime.secret import derive

PURPOSE = "webhooks"


def secret_text(deployment_secret: str, tenant: str, salt: bytes) -> str:
    """A tenant's `whsec_…`: it can be shown again, since it is worked out from the deployment's secret, and is kept
    nowhere. `salt` differs from rotation to rotation."""
    key = hmac.digest(derive(deployment_secret, PURPOSE), salt + tenant.encode(), hashlib.sha256)
    return f"whsec_{b64encode(key).decode()}"


def signed_headers(id: str, body: bytes, secrets: Sequence[str], now: float) -> dict[str, str]:
    moment = datetime.fromtimestamp(int(now), UTC)
    signatures = (Webhook(secret).sign(id, moment, body.decode()) for secret in secrets)
    return {
        "webhook-id": id,
        "webhook-timestamp": str(int(now)),
        "webhook-signature": " ".join(signatures),
        "content-type": "application/json",
        "user-agent": "stoker-webhooks",
    }
