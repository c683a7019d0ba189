"""What routers name must stay: a function that one of its owner's routers sends requests to is not removed, and stays
of its kind."""

from collections.abc import Collection, Iterable, Mapping

from stoker.runtime.gateway.errors import ApiError
from stoker.runtime.spec import FunctionSpec, base_and_adapter, full_name, owner_of, short_name


def refuse_named(deployed: Mapping[str, FunctionSpec], put: Iterable[FunctionSpec], delete: Collection[str]) -> None:
    """A change of what is deployed, by full names. Another tenant's router neither keeps a function nor is told about.
    Raises ApiError 409."""
    made = {spec.name: spec for spec in put}
    others = [name for name, spec in made.items() if name in deployed and deployed[name].kind != spec.kind]
    for router in {**deployed, **made}.values() if delete or others else ():
        for name in uses(router) if router.name not in delete else ():
            if full_name(owner_of(router.name), name) in (*delete, *others):
                raise ApiError(
                    409,
                    f"Router '{short_name(router.name)}' names function '{name}': deploy the router without it, "
                    "or delete the router, first.",
                    param="name",
                    code="function_in_use",
                )


def uses(spec: FunctionSpec) -> tuple[str, ...]:
    """As a router names them, without adapters."""
    if spec.router is None:
        return ()
    models = [base_and_adapter(target)[0] for target in spec.router.targets]
    return (*dict.fromkeys(models), *filter(None, [spec.router.embed]))
