"""The blocking client and the one for event loops can do the same, by the same names and parameters."""

import inspect
from typing import Any

import pytest

from stoker.runtime.client.async_client import AsyncClient
from stoker.runtime.client.async_job import AsyncJob
from stoker.runtime.client.client import Client
from stoker.runtime.client.job import Job


def parameters(kind: type) -> dict[str, list[tuple[str, Any, Any]]]:
    """Of each public method: names, kinds and defaults."""
    methods = {name: member for name, member in inspect.getmembers(kind, callable) if not name.startswith("_")}
    return {
        name: [(each.name, each.kind, each.default) for each in inspect.signature(method).parameters.values()]
        for name, method in methods.items()
    }


@pytest.mark.parametrize(("blocking", "awaited"), [(Client, AsyncClient), (Job, AsyncJob)])
def test_both_can_do_the_same(blocking: type, awaited: type) -> None:
    assert parameters(blocking) == parameters(awaited)
    assert parameters(blocking).keys() >= {"cancel", "stream"}


@pytest.mark.parametrize("kind", [AsyncClient, AsyncJob])
def test_what_asks_the_gateway_is_awaited(kind: type) -> None:
    plain = {
        name
        for name in parameters(kind)
        if not inspect.iscoroutinefunction(getattr(kind, name)) and not inspect.isasyncgenfunction(getattr(kind, name))
    }
    assert plain == ({"attach"} if kind is AsyncClient else set())
