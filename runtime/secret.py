"""The deployment's one secret, and the keys for single purposes that are derived from it."""

import contextlib
import hashlib
import hmac
import os
import secrets
from pathlib import Path

MIN_CHARACTERS = 16


def derive(secret: str, purpose: str) -> bytes:
    """32 bytes that say nothing about the secret or about another purpose's key (HMAC-SHA-256)."""
    return hmac.digest(secret.encode(), b"stoker " + purpose.encode(), hashlib.sha256)


def kept_secret(folder: Path) -> str:
    """The secret of this machine's data folder, made on first use and readable by its owner only."""
    path = folder / "secret"
    with contextlib.suppress(FileNotFoundError):
        return path.read_text().strip()
    folder.mkdir(parents=True, exist_ok=True)
    scratch = folder / f"secret.{os.getpid()}"
    with open(os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(secrets.token_urlsafe(32))
    with contextlib.suppress(FileExistsError):
        os.link(scratch, path)
    scratch.unlink()
    return path.read_text().strip()
