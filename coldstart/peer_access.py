"""How hosts of one deployment prove to each other that they belong to it: requests signed with a shared key."""

import hashlib
import hmac
import time

SCHEME = "stoker-peer"
VALID_S = 120.0


def authorization(key: bytes, path: str, now: float) -> str:
    """The Authorization header of a GET of `path`: when it was made (Unix seconds), and its HMAC-SHA-256."""
    at = f"{now:.0f}"
    return f"{SCHEME} {at}:{signature(key, path, at)}"


def is_authorized(key: bytes, path: str, header: str, now: float) -> bool:
    """Whether a holder of the key made this request lately. Whoever overhears it can repeat it, for bytes that they
    have then overheard as well."""
    scheme, _, rest = header.partition(" ")
    at, _, given = rest.partition(":")
    if scheme != SCHEME or not at.isascii() or not at.isdigit() or abs(now - int(at)) > VALID_S:
        return False
    return hmac.compare_digest(given.encode(), signature(key, path, at).encode())


def signature(key: bytes, path: str, at: str) -> str:
    return hmac.digest(key, f"GET\n{path}\n{at}".encode(), hashlib.sha256).hex()


def signed_now(key: bytes, path: str) -> dict[str, str]:
    return {"Authorization": authorization(key, path, time.time())}
