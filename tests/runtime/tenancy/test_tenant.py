from typing import Any

import pytest

from stoker.runtime.tenancy.tenant import InvalidTenant, Tenant, TenantLimits, limits_of


def test_a_tenant_survives_the_wire() -> None:
    tenant = Tenant("acme", 5.0, 2.0, TenantLimits(requests_per_minute=10, budget_usd=2.5))
    assert Tenant.from_dict(tenant.to_dict()) == tenant


@pytest.mark.parametrize("name", ["", "Acme", "a.b", "a b", "1a", "a" * 33, "a--b", "a/b"])
def test_names_that_would_not_make_a_key_or_a_path_are_refused(name: str) -> None:
    with pytest.raises(InvalidTenant, match="tenant name"):
        Tenant(name)


@pytest.mark.parametrize("weight", [0, -1, 1e9, float("nan"), "2", True])
def test_weights_that_cannot_work_are_refused(weight: Any) -> None:
    with pytest.raises(InvalidTenant, match="weight"):
        Tenant("acme", weight=weight)


@pytest.mark.parametrize(
    "limits", [{"concurrency": -1}, {"concurrency": 1.5}, {"budget_usd": "5"}, {"budget_usd": float("inf")}, {"rpm": 1}]
)
def test_limits_that_cannot_work_are_named(limits: dict[str, Any]) -> None:
    with pytest.raises(InvalidTenant, match=next(iter(limits))):
        limits_of(limits)
