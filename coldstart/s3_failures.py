"""Reads S3's answers: what a failed call or an unfit range response means, in words that never hold a secret."""

import contextlib
import re
from collections.abc import Mapping
from typing import NamedTuple
from xml.etree import ElementTree

from botocore.exceptions import BotoCoreError, ClientError

from stoker.coldstart.failures import (
    ByteRange,
    ColdStartError,
    ObjectChanged,
    ObjectMissing,
    ObjectTruncated,
    StoreUnavailable,
)
from stoker.coldstart.retry import Transient

CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+|\*)")
REFUSALS = (429, 503)
EXPIRED = ("ExpiredToken", "RequestExpired")
KINDS: dict[int, type[ColdStartError]] = {404: ObjectMissing, 412: ObjectChanged, 416: ObjectTruncated}


class Access(NamedTuple):
    """How the store is reached, for error messages."""

    endpoint: str
    addressing: str
    credentials: str

    def __str__(self) -> str:
        return f"endpoint {self.endpoint}, {self.addressing} addressing, credentials: {self.credentials}"


class Answer(NamedTuple):
    """A response that isn't the wanted one; `code` and `message` are S3's own."""

    status: int
    code: str
    message: str
    request_id: str

    def __str__(self) -> str:
        return f"HTTP {self.status} {self.code} {self.message} (request id {self.request_id or 'none'})"


def answer_of(status: int, headers: Mapping[str, str], body: bytes) -> Answer:
    fields = {}
    with contextlib.suppress(ElementTree.ParseError):
        fields = {element.tag.rpartition("}")[2]: element.text or "" for element in ElementTree.fromstring(body)}
    request_id = headers.get("x-amz-request-id") or fields.get("RequestId", "")
    return Answer(status, fields.get("Code", ""), fields.get("Message", ""), request_id)


def failure_of(name: str, span: ByteRange | None, answer: Answer, access: Access) -> Exception:
    """The typed error, wrapped in Transient when the same request may succeed a little later."""
    failure = KINDS.get(answer.status, StoreUnavailable)(name, span, f"{answer}; {access}")
    passing = answer.status == 429 or answer.status >= 500 or answer.code in EXPIRED
    return Transient(failure, refused=answer.status in REFUSALS) if passing else failure


def client_failure(name: str, error: ClientError | BotoCoreError, access: Access) -> ColdStartError:
    """For control calls, which the client has already repeated."""
    if not isinstance(error, ClientError):
        return StoreUnavailable(name, None, f"{error}; {access}")
    details, metadata = error.response.get("Error", {}), error.response.get("ResponseMetadata", {})
    status = metadata.get("HTTPStatusCode", 0)
    answer = Answer(status, details.get("Code", ""), details.get("Message", ""), metadata.get("RequestId", ""))
    return KINDS.get(status, StoreUnavailable)(name, None, f"{answer}; {access}")


def check_range_headers(name: str, span: ByteRange, headers: Mapping[str, str], etag: str) -> None:
    """A 206 must carry exactly the bytes asked for, of the version asked for, as they are stored.

    Raises ObjectTruncated, ObjectChanged or StoreUnavailable.
    """
    start, end = span
    encoding = headers.get("content-encoding", "identity")
    if encoding != "identity":
        raise StoreUnavailable(name, span, f"the body came with Content-Encoding {encoding}")
    found = CONTENT_RANGE.fullmatch(headers.get("content-range", ""))
    if not found or int(found[1]) != start or int(found[2]) > end - 1:
        raise StoreUnavailable(name, span, f"the answer's Content-Range is {headers.get('content-range')!r}")
    if int(found[2]) < end - 1:
        raise ObjectTruncated(name, span, f"the stored object has only {found[3]} bytes")
    if headers.get("content-length") != str(end - start):
        raise ObjectTruncated(name, span, f"the answer announces {headers.get('content-length')} bytes")
    if etag and headers.get("etag", etag) != etag:
        raise ObjectChanged(name, span, f"its ETag is {headers['etag']}, not {etag}")
