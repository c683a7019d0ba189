"""JSON Schema's formats as the worker reads them: what one would refuse is refused before anything wakes, and nothing
else is (a date-time without a zone is one for pydantic, though not for RFC 3339)."""

import ipaddress
import uuid
from collections.abc import Callable, Mapping
from datetime import date, datetime, time, timedelta
from typing import Any

from pydantic import (
    UUID1,
    UUID3,
    UUID4,
    UUID5,
    UUID6,
    UUID7,
    UUID8,
    AnyUrl,
    IPvAnyAddress,
    TypeAdapter,
    ValidationError,
)

Check = Callable[[str], bool]


def reads_as(kind: Any) -> Check:
    adapter = TypeAdapter(kind)

    def check(text: str) -> bool:
        try:
            adapter.validate_python(text)
        except ValidationError:
            return False
        return True

    return check


def anything(text: str) -> bool:
    """Left to the worker: what a pattern or an address may be differs with who reads it."""
    return True


FORMATS: Mapping[str, Check] = {
    "date": reads_as(date),
    "date-time": reads_as(datetime),
    "time": reads_as(time),
    "duration": reads_as(timedelta),
    "uuid": reads_as(uuid.UUID),
    **{
        f"uuid{n}": reads_as(kind)
        for n, kind in zip("1345678", (UUID1, UUID3, UUID4, UUID5, UUID6, UUID7, UUID8), strict=True)
    },
    "uri": reads_as(AnyUrl),
    "ipv4": reads_as(ipaddress.IPv4Address),
    "ipv6": reads_as(ipaddress.IPv6Address),
    "ipv4network": reads_as(ipaddress.IPv4Network),
    "ipv6network": reads_as(ipaddress.IPv6Network),
    "ipv4interface": reads_as(ipaddress.IPv4Interface),
    "ipv6interface": reads_as(ipaddress.IPv6Interface),
    "ipvanyaddress": reads_as(IPvAnyAddress),
    "regex": anything,
    "email": anything,
}
