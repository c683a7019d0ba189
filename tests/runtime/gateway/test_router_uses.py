"""Which functions routers keep from being removed."""

from dataclasses import replace
from typing import Any

import pytest

from stoker.runtime.gateway.errors import ApiError
from stoker.runtime.gateway.router_uses import refuse_named
from stoker.runtime.routing.router import Route, Router
from stoker.runtime.spec import FunctionSpec, full_name

ROUTES = (Route("orders", examples=("where is it",)), Route("talk", examples=("hello",), tools=True))
ROUTER = Router(ROUTES, "talk", embed="meaning", fallbacks={"talk": "spare"})


def deployed(owner: str = "") -> dict[str, FunctionSpec]:
    """A router, what it names and something else, of one owner."""
    front = FunctionSpec(name=full_name(owner, "front"), kind="router", version="v", router=ROUTER)
    models = [model(full_name(owner, name)) for name in ("orders", "talk", "spare", "other")]
    return {each.name: each for each in (front, model(full_name(owner, "meaning"), "embed"), *models)}


def model(name: str, kind: Any = "llm") -> FunctionSpec:
    return FunctionSpec(name=name, kind=kind, version="v", weights="file:///w")


@pytest.mark.parametrize("name", ["orders", "talk", "spare", "meaning"])
@pytest.mark.parametrize("owner", ["", "ann"])
def test_what_a_router_names_does_not_go(name: str, owner: str) -> None:
    full = full_name(owner, name)
    with pytest.raises(ApiError, match=f"Router 'front' names function '{name}'") as refused:
        refuse_named(deployed(owner), [], [full])
    assert (refused.value.status, refused.value.code) == (409, "function_in_use")
    python = FunctionSpec(name=full, kind="python", code="0" * 64, entry="m:f")
    with pytest.raises(ApiError, match="Router 'front'"):
        refuse_named(deployed(owner), [python], [])


def test_it_goes_with_its_router_or_once_that_names_others() -> None:
    refuse_named(deployed(), [], ["talk", "front"])
    other = replace(ROUTER, routes=(Route("orders", tools=True),), default="orders", embed="", fallbacks={})
    refuse_named(deployed(), [replace(deployed()["front"], router=other)], ["talk", "meaning"])
    with pytest.raises(ApiError, match="Router 'front' names function 'orders'"):
        refuse_named({}, [replace(deployed()["front"], router=other)], ["orders"])


def test_what_none_of_its_owners_routers_names_goes() -> None:
    refuse_named(deployed(), [], ["other"])
    refuse_named(deployed("ann"), [], ["talk"])
    refuse_named(deployed(), [], ["ann.talk"])
    refuse_named(deployed(), [replace(deployed()["talk"], version="w")], [])


def test_a_model_stays_for_its_adapter() -> None:
    router = Router((Route("orders:sql", tools=True),), "talk")
    front = replace(deployed()["front"], router=router)
    with pytest.raises(ApiError, match="Router 'front' names function 'orders'"):
        refuse_named(deployed(), [front], ["orders"])
