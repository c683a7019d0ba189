"""Logging in to Amazon ElastiCache with an AWS identity: the password is a presigned request, good for 15 minutes.

https://docs.aws.amazon.com/AmazonElastiCache/latest/dg/auth-iam.html
"""

import asyncio
from functools import cached_property
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit, urlunsplit

from redis.credentials import CredentialProvider
from redis.exceptions import ConnectionError as RedisConnectionError

PARAMETER = "iam"
VALID_S = 900


class IamCredentials(CredentialProvider):
    """Signs a token for each new connection, with the credentials and the region that boto3 finds."""

    def __init__(self, user: str, cache: str) -> None:
        self._user = user
        self._cache = cache

    def get_credentials(self) -> tuple[str, str]:
        """User and token. Raises redis-py's ConnectionError where there are no AWS credentials or no region (yet)."""
        from botocore.exceptions import BotoCoreError

        try:
            return self._user, token(self._session, self._user, self._cache)
        except BotoCoreError as error:
            raise RedisConnectionError(f"no token to log in to the cache {self._cache}: {error}") from error

    async def get_credentials_async(self) -> tuple[str, str]:
        # Credentials come from the host's metadata service, at first and whenever they are about to end.
        return await asyncio.to_thread(self.get_credentials)

    @cached_property
    def _session(self) -> Any:
        import botocore.session

        return botocore.session.get_session()


def token(session: Any, user: str, cache: str) -> str:
    """What `user` sends as its password to the serverless cache named `cache`; `session` is botocore's."""
    from botocore.exceptions import NoCredentialsError, NoRegionError
    from botocore.model import ServiceId
    from botocore.signers import RequestSigner

    credentials, region = session.get_credentials(), session.get_config_variable("region")
    if credentials is None:
        raise NoCredentialsError
    if not region:
        raise NoRegionError
    events = session.get_component("event_emitter")
    signer = RequestSigner(ServiceId("elasticache"), region, "elasticache", "v4", credentials, events)
    query = urlencode({"Action": "connect", "User": user, "ResourceType": "ServerlessCache"})
    request = {"method": "GET", "url": f"http://{cache}/?{query}", "body": {}, "headers": {}, "context": {}}
    signed: Any = signer.generate_presigned_url(
        request, operation_name="connect", expires_in=VALID_S, region_name=region
    )
    return signed.removeprefix("http://")


def separate(url: str) -> tuple[str, IamCredentials | None]:
    """The server's URL without `?iam=CACHE`, and the credentials which that asks for.

    Raises ValueError for one without TLS or a user.
    """
    parts = urlsplit(url)
    options = parse_qs(parts.query)
    if PARAMETER not in options:
        return url, None
    if parts.scheme != "rediss" or not parts.username:
        raise ValueError("a login with an AWS identity must look like rediss://USER@HOST:PORT?iam=CACHE")
    cache = options.pop(PARAMETER)[0]
    host = parts.netloc.rpartition("@")[2]
    bare = urlunsplit((parts.scheme, host, parts.path, urlencode(options, doseq=True), ""))
    return bare, IamCredentials(parts.username, cache)
