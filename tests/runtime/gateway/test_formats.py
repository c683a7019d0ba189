"""The gateway takes a text for a format exactly if the worker does."""

import ipaddress
import uuid
from collections.abc import Callable
from datetime import date, datetime, time, timedelta
from typing import Any

import pytest
from pydantic import UUID4, UUID7, AnyUrl, IPvAnyAddress

from stoker.runtime.gateway.input_check import compiled
from stoker.runtime.inputs import Inputs, Misfit

TEXTS = [
    *("2026-01-02", "2026-02-30", "2026-01-02T00:00:00", "2026-01-02T03:04:05", "2026-01-02 03:04:05Z", "tomorrow", ""),
    *("03:04", "03:04:05", "03:04:05Z", "25:00", "P1D", "1:00:00", "1 day, 01:00:00", "1700000000", "1.5"),
    *(
        "12345678123456781234567812345678",
        "12345678-1234-4678-9234-567812345678",
        "01890a5d-ac96-774b-bcce-b302099a8057",
        "urn:uuid:nobody",
    ),
    *(
        "10.0.0.1",
        "10.0.0.0/8",
        "10.0.0.1/8",
        "10.0.0.256",
        "::1",
        "fe80::/10",
        "fe80::1/10",
        "http://a.b/c",
        "http://a b",
    ),
]
KINDS = [
    *(date, datetime, time, timedelta, uuid.UUID, UUID4, UUID7, AnyUrl, IPvAnyAddress),
    *(ipaddress.IPv4Address, ipaddress.IPv6Address, ipaddress.IPv4Network, ipaddress.IPv6Network),
    *(ipaddress.IPv4Interface, ipaddress.IPv6Interface),
]


def taker(kind: Any) -> Callable[..., None]:
    def body(value):  # type: ignore[no-untyped-def]
        ...

    body.__annotations__["value"] = kind
    return body


def worker_takes(inputs: Inputs, text: str) -> bool:
    try:
        inputs.arguments(text)
    except Misfit:
        return False
    return True


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_the_gateway_and_the_worker_agree(kind: Any) -> None:
    inputs = Inputs(taker(kind))
    validator = compiled(inputs.schema() or {})
    said = {text: validator.is_valid(text) for text in TEXTS}
    assert said == {text: worker_takes(inputs, text) for text in TEXTS}
    assert set(said.values()) == {True, False}


def test_what_nobody_can_decide_here_is_left_to_the_worker() -> None:
    for name in ("regex", "email", "path", "a format of one's own"):
        assert compiled({"type": "string", "format": name}).is_valid("(")
