"""The error of a job that a deployment overtook: it was accepted for another version than the one that serves now."""

from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from stoker.queue.records import Claim
from stoker.runtime.contract import made_of
from stoker.runtime.releases import Release
from stoker.runtime.spec import FunctionSpec, InvalidSpec

CODE = "version_changed"


def overtaken(claim: Claim, spec: FunctionSpec, made_for: str, said: str, kept: Iterable[Release]) -> dict[str, Any]:
    """`spec` serves now, and doesn't take the input, as it `said`; `made_for`: the contract of the version that the job
    was accepted for, which is one of those that are `kept`, the newest first, or gone."""
    release = next((release for release in kept if contract_in(release, spec.name) == made_for), None)
    return {"type": "invalid_request_error", "message": message(claim.job_id, spec, said, release), "code": CODE}


def message(job_id: str, spec: FunctionSpec, said: str, release: Release | None) -> str:
    now = f"version {spec.version}, which serves now, doesn't take its input" + (f" ({said})" if said else "")
    if release is None:
        return (
            f"the job was accepted for another version, which is no longer kept, and {now}: send it again as that "
            "version takes it"
        )
    return (
        f"the job was accepted for version {release.versions[spec.name]}, and {now}: send it again as that version "
        f"takes it, or run it as it was accepted: `stoker rollback {spec.app} {release.version}`, then "
        f"`stoker jobs replay {job_id}`"
    )


def contract_in(release: Release, function: str) -> str:
    """Of the function's version in it; "" for none that this stoker can read."""
    with suppress(KeyError, InvalidSpec):
        return made_of(FunctionSpec.from_dict(dict(release.specs[function])))
    return ""
