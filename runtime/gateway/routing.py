"""Finds the function that answers a request to a router, and notes why."""

import asyncio
import contextlib
from collections.abc import Mapping, Sequence

from stoker.coldstart.failures import ColdStartError
from stoker.queue.records import Backlog, pack
from stoker.runtime.gateway.cluster_view import Snapshot
from stoker.runtime.gateway.endpoint import ROUTED, Incoming
from stoker.runtime.gateway.errors import ApiError, bad_request, function_not_found, not_found
from stoker.runtime.gateway.registry import Registry
from stoker.runtime.gateway.route_lessons import embedded
from stoker.runtime.gateway.schema import ChatRequest, CompletionRequest, Sampling
from stoker.runtime.gateway.waiting import replicas_of
from stoker.runtime.routing.decision import Decision, TargetState, among, by_examples, by_rule, with_fallback
from stoker.runtime.routing.facts import Facts
from stoker.runtime.routing.lessons import lessons_key
from stoker.runtime.routing.router import Router
from stoker.runtime.spec import FunctionSpec, Kind, adapted_name, base_and_adapter, full_name, owner_of, short_name

LIKENESS_CHARS = 20_000


async def routed(incoming: Incoming, spec: FunctionSpec, request: Sampling, key: str) -> FunctionSpec:
    """The target of router `spec` that gets this request. One that was sent before under `key` goes where it went.
    The decision goes into the answer's header and the job's record. Raises ApiError 404 when no target is left."""
    targets = await targets_of(incoming.gateway.registry, spec)
    if not targets:
        raise nothing_left(spec)
    decision = await sent_before(incoming, targets, key) or await decide(incoming, spec, targets, facts_of(request))
    note = {"router": short_name(spec.name), **decision.to_dict()}
    incoming.scope[ROUTED] = (decision.header(), pack(note), base_and_adapter(decision.target)[1])
    return targets[decision.target]


async def targets_of(registry: Registry, spec: FunctionSpec) -> dict[str, FunctionSpec]:
    """By the names that router `spec` has for them; without those that are no language models any more, or whose
    adapter is gone."""
    assert spec.router is not None
    found: dict[str, FunctionSpec] = {}
    for name in spec.router.targets:
        base, adapter = base_and_adapter(name)
        with contextlib.suppress(ApiError):
            target = await named(registry, spec, base, "llm")
            if not adapter or adapter in target.adapters:
                found[name] = target
    return found


async def named(registry: Registry, router: FunctionSpec, name: str, kind: Kind) -> FunctionSpec:
    """What the router's owner means by `name`. Raises ApiError 404 when that is not of this kind."""
    found: FunctionSpec | None = None
    for full in dict.fromkeys((full_name(owner_of(router.name), name), name)):
        with contextlib.suppress(ApiError):
            found = found or await registry.get(full)
    if found is None or found.kind != kind:
        raise function_not_found(name, "model")
    return found


def nothing_left(router: FunctionSpec) -> ApiError:
    assert router.router is not None
    names = " and ".join(f"'{name}'" for name in router.router.targets)
    return not_found(
        f"Router '{short_name(router.name)}' has no model left: {names} must be deployed as a language model.",
        code="model_not_found",
        param="model",
    )


async def sent_before(incoming: Incoming, targets: Mapping[str, FunctionSpec], key: str) -> Decision | None:
    for name, spec in targets.items() if key else ():
        if await incoming.gateway.broker.job_id_of(spec.name, incoming.caller.tenant, key):
            return Decision(name, "repeated")
    return None


async def decide(incoming: Incoming, spec: FunctionSpec, targets: Mapping[str, FunctionSpec], facts: Facts) -> Decision:
    router = spec.router
    assert router is not None
    decision = by_rule(router, facts)
    if decision is None and router.embed and facts.text:
        decision = await by_likeness(incoming, spec, router, facts.text)
    decision = among(router, decision or Decision(router.default, "default"), targets)
    if not router.fallbacks:
        return decision
    view = await incoming.gateway.view.snapshot()
    backlogs = await incoming.gateway.broker.backlogs([target.name for target in targets.values()])
    states = {name: state_of(target, view, backlogs.get(target.name)) for name, target in targets.items()}
    return with_fallback(router, decision, states)


async def by_likeness(incoming: Incoming, spec: FunctionSpec, router: Router, text: str) -> Decision:
    """By one embedding; whatever goes wrong with it is no reason to fail the request."""
    gateway = incoming.gateway
    try:
        async with asyncio.timeout(router.classify_within_ms / 1000):
            encoder = await named(gateway.registry, spec, router.embed, "embed")
            classifier = await gateway.lessons.learned(
                gateway.store, lessons_key(router.lessons, encoder.name, encoder.version)
            )
            if classifier is None:
                return Decision(router.default, "default", "its examples are not learned; deploy the router again")
            vectors = await embedded(gateway, incoming.caller, encoder, [text[:LIKENESS_CHARS]])
    except TimeoutError:
        return Decision(router.default, "default", f"no embedding within {router.classify_within_ms:g} ms")
    except (ApiError, ColdStartError) as error:
        return Decision(router.default, "default", f"no embedding: {error}"[:200])
    return by_examples(router, classifier.scores(vectors[0]))


def state_of(spec: FunctionSpec, view: Snapshot, backlog: Backlog | None) -> TargetState:
    """Whether it is awake may be known a second late; what waits is known now."""
    awake = any(replica["state"] == "ready" for replica in replicas_of(view.hosts, spec.name))
    waiting = backlog.queued + backlog.delayed if backlog else 0
    return TargetState(waiting, spec.limits.max_queued, awake, spec.name in view.failing and not awake)


def facts_of(request: Sampling) -> Facts:
    texts = texts_of(request)
    structured = bool(request.structured_outputs) or (
        request.response_format is not None and request.response_format.type != "text"
    )
    tools = isinstance(request, ChatRequest) and bool(request.offered_tools)
    return Facts(texts[-1] if texts else "", sum(map(len, texts)), tools, structured, request.metadata or {})


def texts_of(request: Sampling) -> list[str]:
    """The conversation, behind it what the user said last."""
    if isinstance(request, CompletionRequest):
        prompt = request.single_prompt
        return [prompt] if isinstance(prompt, str) else []
    assert isinstance(request, ChatRequest)
    said = [message.as_template_input() for message in request.messages]
    users = [place for place, message in enumerate(said) if message["role"] == "user"]
    last = users[-1] if users else len(said) - 1
    return [str(message["content"]) for message in (*said[:last], *said[last + 1 :], said[last])]


def check_routers(specs: Sequence[FunctionSpec], visible: Mapping[str, FunctionSpec]) -> None:
    """That the routers among the specs of one deployment name functions that are there then. Raises ApiError 400."""
    there = {**visible, **{short_name(spec.name): spec for spec in specs}}
    for spec in specs:
        if spec.router:
            wanted = [(name, "llm") for name in spec.router.targets]
            wanted += [(spec.router.embed, "embed")] if spec.router.embed else []
            for name, kind in wanted:
                if wrong := why_no_target(name, kind, there):
                    message = f"Router '{short_name(spec.name)}' {wrong}."
                    raise bad_request(message, param="spec.router", code="invalid_spec")


def why_no_target(name: str, kind: str, there: Mapping[str, FunctionSpec]) -> str:
    """Nothing if a router can use it as this kind of function."""
    base, adapter = base_and_adapter(name)
    found = there.get(base)
    if found is None:
        return f"names '{name}', which is not deployed; deploy it first, or with it"
    if found.kind != kind:
        what = "a language model" if kind == "llm" else "an embedding model"
        return f"needs {what} where it names '{name}'"
    is_whole = name == adapted_name(base, adapter) and (not adapter or adapter in found.adapters)
    return "" if is_whole else f"names '{name}', but model '{base}' has no adapter '{adapter}'"
