"""Teaches routers their examples when they are deployed, and embeds what their requests say."""

import asyncio
import time
from collections.abc import Sequence

import numpy as np

from stoker.coldstart.failures import ColdStartError
from stoker.runtime.gateway.auth import Caller
from stoker.runtime.gateway.calls import Call, new_job
from stoker.runtime.gateway.context import Gateway
from stoker.runtime.gateway.endpoint import STARTED, Incoming, no_more_body
from stoker.runtime.gateway.errors import ApiError, store_unavailable
from stoker.runtime.gateway.generation import context_limit
from stoker.runtime.routing.classifier import train
from stoker.runtime.routing.lessons import lessons_key
from stoker.runtime.spec import FunctionSpec, full_name, owner_of, short_name

TEXTS_PER_JOB = 256
LEARN_S = 240.0


async def teach(gateway: Gateway, caller: Caller, specs: Sequence[FunctionSpec]) -> None:
    """The routers among what was just deployed, with the deployed embedding function. Raises ApiError 503."""
    for spec in specs:
        if spec.router and spec.router.embed:
            try:
                async with asyncio.timeout(LEARN_S):
                    await learn(gateway, caller, spec)
            except (ApiError, ColdStartError, TimeoutError) as error:
                raise untaught(spec, error) from error


async def learn(gateway: Gateway, caller: Caller, spec: FunctionSpec) -> None:
    """What was learned before is not learned again."""
    assert spec.router is not None
    encoder = await embedder_of(gateway, spec)
    key = lessons_key(spec.router.lessons, encoder.name, encoder.version)
    if await gateway.lessons.learned(gateway.store, key) is None:
        texts, targets = zip(*spec.router.lessons, strict=True)
        parts = [texts[start : start + TEXTS_PER_JOB] for start in range(0, len(texts), TEXTS_PER_JOB)]
        vectors = np.concatenate([await embedded(gateway, caller, encoder, part) for part in parts])
        await gateway.lessons.put(gateway.store, key, await asyncio.to_thread(train, vectors, targets))


def untaught(spec: FunctionSpec, error: BaseException) -> ApiError:
    why = "its embedding model did not answer in time" if isinstance(error, TimeoutError) else str(error)
    message = (
        f"The app is deployed, but router '{short_name(spec.name)}' could not learn its examples: {why}. What no "
        "condition decides goes to its default until the app is deployed again."
    )
    return ApiError(503, message, type="server_error", code="router_untaught", headers={"retry-after": "10"})


async def embedder_of(gateway: Gateway, router: FunctionSpec) -> FunctionSpec:
    """The deployed function that the router's `embed` names: its owner's, or else one that all share."""
    assert router.router is not None
    deployed = await gateway.registry.all()
    owners, shared = full_name(owner_of(router.name), router.router.embed), router.router.embed
    if found := deployed.get(owners) or deployed.get(shared):
        return found
    raise ApiError(404, f"there is no '{shared}'", code="model_not_found")


async def embedded(gateway: Gateway, caller: Caller, spec: FunctionSpec, texts: Sequence[str]) -> np.ndarray:
    """Unit vectors [texts, dimensions]; a text that is longer than the model reads is cut. Raises ApiError."""
    try:
        encoder = await gateway.prompts.get(spec)
    except ColdStartError as error:
        raise store_unavailable(str(error)) from error
    most = context_limit(spec, encoder.facts)
    ids = [cut(each, most) for each in await gateway.prompts.run(caller.tenant, encoder.texts, texts)]
    scope = {"type": "http", STARTED: time.monotonic()}
    incoming = Incoming(gateway, caller, scope, {}, b"", no_more_body)
    job = new_job(incoming, spec, {"kind": "embed", "texts": ids}, cost=float(sum(map(len, ids))))
    async with Call(incoming, spec, job) as call:
        result = (await call.outcome()).value()
    return np.frombuffer(result["vectors"], np.float32).reshape(len(texts), -1)


def cut(ids: list[int], most: int) -> list[int]:
    """The last token ends the text for the model and stays."""
    return ids if len(ids) <= most else [*ids[: most - 1], ids[-1]]
