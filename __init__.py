"""stoker: a self-hosted serverless GPU function runtime."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stoker.runtime.client.async_client import AsyncClient
    from stoker.runtime.client.client import Client
    from stoker.runtime.client.errors import JobFailed, StokerError, WaitTimeout
    from stoker.runtime.routing.router import Route
    from stoker.runtime.sdk import SLO, App, Batch, load, method
    from stoker.runtime.spec import Limits

HOMES = {
    "SLO": "stoker.runtime.sdk",
    "App": "stoker.runtime.sdk",
    "Batch": "stoker.runtime.sdk",
    "Limits": "stoker.runtime.spec",
    "load": "stoker.runtime.sdk",
    "method": "stoker.runtime.sdk",
    "AsyncClient": "stoker.runtime.client.async_client",
    "Route": "stoker.runtime.routing.router",
    "Client": "stoker.runtime.client.client",
    "JobFailed": "stoker.runtime.client.errors",
    "StokerError": "stoker.runtime.client.errors",
    "WaitTimeout": "stoker.runtime.client.errors",
}
__all__ = [
    "SLO",
    "App",
    "AsyncClient",
    "Batch",
    "Client",
    "JobFailed",
    "Limits",
    "Route",
    "StokerError",
    "WaitTimeout",
    "load",
    "method",
]


def __getattr__(name: str) -> object:
    if name in HOMES:
        return getattr(import_module(HOMES[name]), name)
    raise AttributeError(f"module 'stoker' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
