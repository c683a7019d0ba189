"""stoker: a self-hosted serverless GPU function runtime."""

from typing import Any

__all__ = ["App", "Batch", "SLO", "Client"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from stoker.runtime import sdk

        return getattr(sdk, name)
    raise AttributeError(f"module 'stoker' has no attribute {name!r}")
