"""Who calls: every route asks here before anything else is read."""

from dataclasses import dataclass

from starlette.datastructures import Headers

DEFAULT_TENANT = "default"


@dataclass(frozen=True, slots=True)
class Caller:
    tenant: str


def identify(headers: Headers) -> Caller:
    """Without tenants every caller is the same one, whatever its `Authorization: Bearer` token says."""
    return Caller(DEFAULT_TENANT)
