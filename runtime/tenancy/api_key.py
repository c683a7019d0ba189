"""API keys: `sk-stoker-<id>-<secret>`, shown once, kept as a digest that is useless without the deployment's pepper."""

import hashlib
import hmac
import re
import secrets
import time
from base64 import urlsafe_b64encode
from dataclasses import asdict, dataclass
from typing import Any, Literal

from stoker.runtime.secret import derive

Scope = Literal["invoke", "deploy", "admin"]
SCOPES: tuple[Scope, ...] = ("invoke", "deploy", "admin")

PREFIX = "sk-stoker"
TEXT = re.compile(rf"{PREFIX}-([a-z0-9]{{4,16}})-([A-Za-z0-9_-]{{43}})")
ID_ALPHABET = "abcdefghijklmnopqrstuvwxyz0123456789"
ROOT = "root"
OPERATOR = "default"
NO_DIGEST = bytes(32)


@dataclass(frozen=True, slots=True)
class KeyRecord:
    """What is stored of a key. `expires_at` is Unix seconds, 0 for never."""

    id: str
    tenant: str
    scopes: tuple[Scope, ...]
    digest: bytes
    created_at: float
    expires_at: float = 0.0

    def alive(self, now: float) -> bool:
        return not self.expires_at or now < self.expires_at

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "KeyRecord":
        return cls(**{**data, "scopes": tuple(data["scopes"])})


class Keyring:
    """Makes keys and tells right ones from wrong ones; `secret` is the deployment's."""

    def __init__(self, secret: str) -> None:
        self._pepper = derive(secret, "api-keys")

    def make(self, tenant: str, scopes: tuple[Scope, ...], expires_at: float = 0.0) -> tuple[str, KeyRecord]:
        """The key's text, which is kept nowhere, and its record."""
        key_id = "".join(secrets.choice(ID_ALPHABET) for _ in range(12))
        secret = secrets.token_urlsafe(32)
        record = KeyRecord(key_id, tenant, scopes, self._digest(secret), time.time(), expires_at)
        return f"{PREFIX}-{key_id}-{secret}", record

    def root_text(self) -> str:
        """The operator's own key: whoever has the deployment's secret can work it out, and nobody else."""
        secret = urlsafe_b64encode(hmac.digest(self._pepper, b"root key", hashlib.sha256)).decode().rstrip("=")
        return f"{PREFIX}-{ROOT}-{secret}"

    def root_record(self) -> KeyRecord:
        _, secret = parse(self.root_text()) or ("", "")
        return KeyRecord(ROOT, OPERATOR, SCOPES, self._digest(secret), 0.0)

    def opens(self, secret: str, record: KeyRecord | None) -> bool:
        """Takes as long for an unknown id as for a wrong secret."""
        digest = self._digest(secret)
        return hmac.compare_digest(digest, record.digest if record else NO_DIGEST) and record is not None

    def _digest(self, secret: str) -> bytes:
        return hmac.digest(self._pepper, secret.encode(), hashlib.sha256)


def parse(text: str) -> tuple[str, str] | None:
    """Id and secret of a key's text; None for what can't be one."""
    match = TEXT.fullmatch(text)
    return (match[1], match[2]) if match else None
