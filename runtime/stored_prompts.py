"""Where prompts that were hot are kept in the object store while their function sleeps: one object a function, which
its replicas overwrite. Hosts write and read them, the controller's sweep deletes those of functions that are gone."""

from stoker.coldstart.store import ObjectStore

PREFIX = "prompt-cache/"


def object_key(function: str) -> str:
    """`function` is the full name: no two owners have one in common."""
    return f"{PREFIX}{function}"


def function_of(key: str) -> str:
    return key.removeprefix(PREFIX)


def forget_all(store: ObjectStore) -> None:
    """Whatever tenants' prompts are in them. Raises ColdStartError."""
    for key in [found.key for found in store.list(PREFIX)]:
        store.delete(key)
