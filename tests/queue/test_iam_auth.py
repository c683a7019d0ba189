import asyncio
import hashlib
import hmac
from pathlib import Path
from urllib.parse import parse_qsl, quote, urlsplit

import pytest
from queue_certificate import certificate
from redis.exceptions import ConnectionError as RedisConnectionError

from stoker.queue.client import connect
from stoker.queue.iam_auth import IamCredentials, separate
from tests.connections import serving

KEY = "an-invented-secret-key"


@pytest.fixture(autouse=True)
def identity(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "AWS_ACCESS_KEY_ID": "AKIDEXAMPLE",
        "AWS_SECRET_ACCESS_KEY": KEY,
        "AWS_SESSION_TOKEN": "session",
        "AWS_REGION": "eu-central-1",
        "AWS_DEFAULT_REGION": "eu-central-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }.items():
        monkeypatch.setenv(name, value)


def signature_of(url: str, key: str) -> str:
    """Signature version 4 of a presigned GET, from its specification."""
    parts = urlsplit(url)
    given = dict(parse_qsl(parts.query))
    claimed = {name: value for name, value in given.items() if name != "X-Amz-Signature"}
    query = "&".join(f"{quote(name, safe='~')}={quote(value, safe='~')}" for name, value in sorted(claimed.items()))
    canonical = f"GET\n/\n{query}\nhost:{parts.netloc}\n\nhost\n{hashlib.sha256(b'').hexdigest()}"
    scope = given["X-Amz-Credential"].split("/", 1)[1]
    text = f"AWS4-HMAC-SHA256\n{given['X-Amz-Date']}\n{scope}\n{hashlib.sha256(canonical.encode()).hexdigest()}"
    digest = f"AWS4{key}".encode()
    for part in [*scope.split("/"), text]:
        digest = hmac.new(digest, part.encode(), hashlib.sha256).digest()
    return digest.hex()


def test_a_token_is_a_signed_request_for_the_cache() -> None:
    user, token = IamCredentials("stoker", "prod").get_credentials()
    assert user == "stoker"
    url = f"http://{token}"
    given = dict(parse_qsl(urlsplit(url).query))
    assert urlsplit(url).netloc == "prod"
    assert (given["Action"], given["User"], given["ResourceType"]) == ("connect", "stoker", "ServerlessCache")
    assert given["X-Amz-Expires"] == "900"
    assert given["X-Amz-Security-Token"] == "session"
    assert given["X-Amz-Credential"].endswith("/eu-central-1/elasticache/aws4_request")
    assert given["X-Amz-Signature"] == signature_of(url, KEY)
    assert given["X-Amz-Signature"] != signature_of(url, "another key")


def test_what_is_missing_is_said_and_may_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_REGION")
    monkeypatch.delenv("AWS_DEFAULT_REGION")
    with pytest.raises(RedisConnectionError, match="the cache prod: You must specify a region"):
        IamCredentials("stoker", "prod").get_credentials()


@pytest.mark.parametrize("url", ["redis://user@host?iam=prod", "rediss://host?iam=prod"])
def test_no_token_is_sent_in_the_clear_or_without_a_user(url: str) -> None:
    with pytest.raises(ValueError, match="rediss://USER@HOST"):
        separate(url)


def test_other_urls_are_left_alone() -> None:
    for url in ("rediss://user:word@host:6379/0?health_check_interval=3", "unix:///tmp/s", "redis://host"):
        assert separate(url) == (url, None)
    assert separate("rediss://user@host:6380/?iam=prod&a=b")[0] == "rediss://host:6380/?a=b"


async def test_every_connection_logs_in_with_a_token_of_its_own(tmp_path: Path) -> None:
    logins: list[tuple[bytes, bytes]] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            words = data.split(b"\r\n")
            if words[2] == b"AUTH":
                logins.append((words[4], words[6]))
            writer.write(b"+OK\r\n" * (data.count(b"\r\n*") + 1))

    async with serving(serve, tls=certificate(tmp_path)) as port:
        client = connect(f"rediss://stoker@localhost:{port}?iam=prod&ssl_ca_certs={tmp_path}/cert.pem")
        assert await client.set("key", "value")
        await client.aclose()
        client = connect(f"rediss://stoker@localhost:{port}?iam=prod&ssl_ca_certs={tmp_path}/cert.pem")
        assert await client.set("key", "value")
        await client.aclose()
    assert [user for user, _ in logins] == [b"stoker", b"stoker"]
    for _, token in logins:
        url = f"http://{token.decode()}"
        assert dict(parse_qsl(urlsplit(url).query))["X-Amz-Signature"] == signature_of(url, KEY)
