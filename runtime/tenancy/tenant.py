"""A tenant: who calls, deploys and pays."""

import re
from dataclasses import asdict, dataclass, field, fields
from typing import Any

NAME = re.compile(r"[a-z][a-z0-9_]*(-[a-z0-9_]+)*")
MOST = 10**12


class InvalidTenant(ValueError):
    """A tenant's name or limit that can't work; the message says which and what to write instead."""


@dataclass(frozen=True, slots=True)
class TenantLimits:
    """Over all functions, 0 = none. Tokens and cost are what requests ask for at most when they are admitted, and what
    they used once that is known. `budget_usd` is for a calendar month (UTC)."""

    requests_per_minute: float = 0
    tokens_per_minute: float = 0
    concurrency: int = 0
    budget_usd: float = 0

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= MOST:
                raise InvalidTenant(f"{name} must be a number from 0 to {MOST:g}, not {value!r}")
        if self.concurrency != int(self.concurrency):
            raise InvalidTenant(f"concurrency must be a whole number, not {self.concurrency!r}")


NONE = TenantLimits()


@dataclass(frozen=True, slots=True)
class Tenant:
    """`weight` is its share of a busy function's workers beside other tenants' weights."""

    name: str
    created_at: float = 0.0
    weight: float = 1.0
    limits: TenantLimits = field(default_factory=TenantLimits)

    def __post_init__(self) -> None:
        if not (len(self.name) <= 32 and NAME.fullmatch(self.name)):
            raise InvalidTenant(f"tenant name {self.name!r} must be 1 to 32 of a-z, 0-9, '_' and '-', from a letter on")
        number = isinstance(self.weight, int | float) and not isinstance(self.weight, bool)
        if not number or not 0.01 <= self.weight <= 1000:
            raise InvalidTenant(f"weight must be a number from 0.01 to 1000, not {self.weight!r}")

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "Tenant":
        return cls(**{**data, "limits": limits_of(data.get("limits") or {})})


def limits_of(data: dict[str, Any]) -> TenantLimits:
    """Raises InvalidTenant for a limit that doesn't exist."""
    if unknown := set(data) - {each.name for each in fields(TenantLimits)}:
        raise InvalidTenant(f"unknown limit(s): {', '.join(sorted(unknown))}")
    return TenantLimits(**data)
