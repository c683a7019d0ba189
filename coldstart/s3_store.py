"""An object store in an S3 bucket. boto3 finds credentials and endpoint, signs and makes the control calls; ranged
reads run on connections of our own, straight into the caller's memory."""

import functools
import http.client
import os
import ssl
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import boto3
import botocore.loaders
import botocore.session
from boto3.exceptions import S3UploadFailedError
from boto3.s3.transfer import TransferConfig
from botocore import UNSIGNED
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError
from botocore.httpsession import get_cert_path

from stoker.coldstart.failures import ByteRange, FetchCancelled, ObjectTruncated, StoreUnavailable
from stoker.coldstart.http_connection import Cancelled, HttpConnection, Origin, Patience, Response
from stoker.coldstart.retry import Transient, persist
from stoker.coldstart.s3_failures import Access, answer_of, check_range_headers, client_failure, failure_of
from stoker.coldstart.store import ObjectInfo, ReadWatch, checked_key

# A signed URL is used for a minute: renewed credentials take effect soon, and signing costs nothing per chunk.
SIGNED_FOR_S = 900
SIGN_AGAIN_S = 60.0
RETRY_BUDGET_S = 60.0
PROGRESS = 0.1
MAX_ERROR_BODY = 64 << 10
MULTIPART = TransferConfig(multipart_threshold=64 << 20, multipart_chunksize=64 << 20, max_concurrency=8)


class S3Store:
    """Objects live below `prefix`. Without credentials requests go unsigned (public buckets).

    Ranged reads are repeated with jitter after 429, 5xx, resets, stalls and short bodies, continuing where the last
    one ended, until nothing has arrived for `retry_budget_s`.
    """

    def __init__(self, bucket: str, prefix: str = "", *, retry_budget_s: float = RETRY_BUDGET_S) -> None:
        self.bucket = bucket
        self.prefix = f"{prefix}/" if prefix else ""
        self.url = f"s3://{bucket}/{prefix}".rstrip("/")
        self._retry_budget_s = retry_budget_s
        session = botocore.session.get_session()
        self._client, self._access = open_client(session)
        self._patience = Patience()
        self._tls = tls_context(session) if self._access.endpoint.startswith("https") else None
        self._signed: dict[str, tuple[str, float]] = {}
        self._idle: list[HttpConnection] = []
        self._lock = threading.Lock()
        weakref.finalize(self, close_all, self._idle)

    def stat(self, key: str) -> ObjectInfo:
        with self._control_call(key):
            found = self._client.head_object(Bucket=self.bucket, Key=self._full(key))
        return ObjectInfo(key, found["ContentLength"], found["ETag"])

    def read(self, key: str) -> bytes:
        return persist(lambda: self._read_once(key), ReadWatch(), self._retry_budget_s)

    def read_range(
        self, key: str, offset: int, into: memoryview, etag: str = "", watch: ReadWatch | None = None
    ) -> None:
        done = 0

        def attempt() -> None:
            nonlocal done
            before = done
            span = (offset + done, offset + len(into))
            done += self._read_range_once(key, span, into[done:], etag, watch or ReadWatch())
            if done < len(into):
                reason = f"the body ended after {done} of {len(into)} bytes; {self._access}"
                # A renewed budget must be earned, so that a body which always ends early can't go on for ever.
                progressed = done - before >= PROGRESS * (len(into) - before)
                raise Transient(ObjectTruncated(self._name(key), span, reason), progressed)

        if into:
            persist(attempt, watch or ReadWatch(), self._retry_budget_s)

    def write(self, key: str, data: bytes | Path) -> ObjectInfo:
        with self._control_call(key):
            if isinstance(data, Path):
                self._client.upload_file(str(data), self.bucket, self._full(key), Config=MULTIPART)
                return self.stat(key)
            found = self._client.put_object(Bucket=self.bucket, Key=self._full(key), Body=data)
            return ObjectInfo(key, len(data), found["ETag"])

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        with self._control_call(prefix):
            pages = self._client.get_paginator("list_objects_v2")
            for page in pages.paginate(Bucket=self.bucket, Prefix=self.prefix + prefix):
                for entry in page.get("Contents", []):
                    yield ObjectInfo(entry["Key"][len(self.prefix) :], entry["Size"], entry["ETag"])

    def delete(self, key: str) -> None:
        with self._control_call(key):
            self._client.delete_object(Bucket=self.bucket, Key=self._full(key))

    def signed_url(self, key: str, media_type: str) -> str:
        target = {"Bucket": self.bucket, "Key": self._full(key), "ResponseContentType": media_type}
        with self._control_call(key):
            return self._client.generate_presigned_url("get_object", target, ExpiresIn=SIGNED_FOR_S)

    def _read_once(self, key: str) -> bytes:
        with self._control_call(key):
            body = self._client.get_object(Bucket=self.bucket, Key=self._full(key))["Body"]
        try:
            return body.read()
        except (BotoCoreError, OSError) as error:
            raise Transient(StoreUnavailable(self._name(key), None, f"{error}; {self._access}")) from error

    def _read_range_once(self, key: str, span: ByteRange, into: memoryview, etag: str, watch: ReadWatch) -> int:
        """The number of bytes received. Raises Transient or a ColdStartError."""
        url = urlsplit(self._signed_url(key))
        headers = {"Range": f"bytes={span[0]}-{span[1] - 1}", **({"If-Match": etag} if etag else {})}
        connection = self._borrow(url.scheme, url.hostname or "", url.port)
        try:
            response = connection.request(f"{url.path}?{url.query}", headers, watch)
            if response.status != http.client.PARTIAL_CONTENT:
                self._refuse(key, span, response, connection, watch)
            check_range_headers(self._name(key), span, response.headers, etag)
            count = connection.receive(response, into, watch)
        except Cancelled as error:
            connection.close()
            raise FetchCancelled(self._name(key), span, "the read was cancelled") from error
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            failure = StoreUnavailable(self._name(key), span, f"{type(error).__name__}: {error}; {self._access}")
            if isinstance(error, ssl.SSLCertVerificationError):
                raise failure from error
            raise Transient(failure, refused=isinstance(error, ConnectionResetError)) from error
        except BaseException:
            connection.close()
            raise
        with self._lock:
            self._idle.append(connection)
        return count

    def _refuse(
        self, key: str, span: ByteRange, response: Response, connection: HttpConnection, watch: ReadWatch
    ) -> None:
        if response.status == http.client.OK:
            reason = f"the server ignored the byte range and sent the whole object; {self._access}"
            raise StoreUnavailable(self._name(key), span, reason)
        answer = answer_of(response.status, response.headers, connection.read(response, MAX_ERROR_BODY, watch))
        # The next attempt signs anew: the token in this URL may be the one that has expired.
        self._signed.pop(key, None)
        raise failure_of(self._name(key), span, answer, self._access)

    def _signed_url(self, key: str) -> str:
        url, at = self._signed.get(key, ("", 0.0))
        if not url or time.monotonic() - at > SIGN_AGAIN_S:
            target = {"Bucket": self.bucket, "Key": self._full(key)}
            with self._control_call(key):
                url = self._client.generate_presigned_url("get_object", target, ExpiresIn=SIGNED_FOR_S)
            self._signed[key] = (url, time.monotonic())
        return url

    def _borrow(self, scheme: str, host: str, port: int | None) -> HttpConnection:
        origin = Origin(scheme, host, port or (443 if scheme == "https" else 80))
        with self._lock:
            connection = next((idle for idle in reversed(self._idle) if idle.origin == origin), None)
            if connection:
                self._idle.remove(connection)
                return connection
        return HttpConnection(origin, self._tls, self._patience)

    @contextmanager
    def _control_call(self, key: str) -> Iterator[None]:
        try:
            yield
        except (ClientError, BotoCoreError) as error:
            raise client_failure(self._name(key), error, self._access) from error
        except S3UploadFailedError as error:
            raise StoreUnavailable(self._name(key), None, f"{error}; {self._access}") from error

    def _full(self, key: str) -> str:
        return self.prefix + checked_key(key)

    def _name(self, key: str) -> str:
        return f"{self.url}/{key}"


def open_client(session: botocore.session.Session) -> tuple[Any, Access]:
    """An explicit endpoint that isn't AWS's gets path-style addresses: few of them resolve bucket names as hosts."""
    credentials = session.get_credentials()
    endpoint = configured_endpoint(session)
    path_style = bool(endpoint) and not (urlsplit(endpoint).hostname or "").endswith(".amazonaws.com")
    config = Config(
        signature_version="s3v4" if credentials else UNSIGNED,
        s3={"addressing_style": "path"} if path_style else None,
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        retries={"mode": "standard", "total_max_attempts": 5},
        connect_timeout=5,
        read_timeout=30,
    )
    session.register_component("data_loader", service_models())
    client = boto3.Session(botocore_session=session).client("s3", config=config)
    source = credentials.method if credentials else "none (unsigned requests)"
    return client, Access(client.meta.endpoint_url, "path-style" if path_style else "default", source)


@functools.cache
def service_models() -> botocore.loaders.Loader:
    """Parsing them is most of what a client costs, so every store after a process's first shares them."""
    return botocore.loaders.create_loader()


def configured_endpoint(session: botocore.session.Session) -> str:
    """From AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL or the profile, in the order that boto3 has."""
    names = (os.environ.get("AWS_ENDPOINT_URL_S3"), os.environ.get("AWS_ENDPOINT_URL"))
    return next(filter(None, names), "") or session.get_scoped_config().get("endpoint_url", "")


def tls_context(session: botocore.session.Session) -> ssl.SSLContext:
    """The same authorities as the client's, AWS_CA_BUNDLE included."""
    return ssl.create_default_context(cafile=session.get_config_variable("ca_bundle") or get_cert_path(True))


def close_all(connections: list[HttpConnection]) -> None:
    for connection in connections:
        connection.close()
