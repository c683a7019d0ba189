"""Calling a deployed function by the function itself, where STOKER_URL and STOKER_API_KEY say."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stoker.runtime.client.client import Client


@cache
def default_client() -> "Client":
    """One for the whole program. Workers, which import apps too, have no use for it and don't load it."""
    from stoker.runtime.client.client import Client

    return Client()


def input_of(body: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What is sent for these arguments: an only parameter's value itself, or an object of the ones that are given.

    Raises TypeError as a local call would.
    """
    signature = inspect.signature(body)
    bound = signature.bind(*args, **kwargs)
    if len(signature.parameters) == 1:
        bound.apply_defaults()
        return next(iter(bound.arguments.values()))
    return dict(bound.arguments)
