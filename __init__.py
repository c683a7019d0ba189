"""stoker: a self-hosted serverless GPU function runtime."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stoker.runtime.sdk import SLO, App, Batch, Client, StokerError

__all__ = ["SLO", "App", "Batch", "Client", "StokerError"]


def __getattr__(name: str) -> object:
    if name in __all__:
        from stoker.runtime import sdk

        return getattr(sdk, name)
    raise AttributeError(f"module 'stoker' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
