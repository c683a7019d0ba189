"""Jobs that the code of other jobs made: one may wait for a replica that is busy with a job which waits for it."""

from contextlib import suppress

from stoker.queue.broker import Broker
from stoker.queue.records import Job, JobState, NewJob
from stoker.runtime.current_job import CALLER
from stoker.runtime.gateway.cluster_view import Snapshot
from stoker.runtime.gateway.endpoint import Incoming
from stoker.runtime.gateway.waiting import WANTS_HOST

MOST_CALLERS = 16
MOST_ID = 256
# No replica is on its way.
AT_LIMIT = {"busy", "max_replicas", *WANTS_HOST}
NAMED = {CALLER: "The id of the job whose code calls, which the SDK sends: a call that waits for itself says so."}


def calling_job(incoming: Incoming) -> str:
    """The id of the job whose code sends the request, as that says; "" for none, and for another tenant's."""
    job_id, caller = incoming.headers.get(CALLER, "")[:MOST_ID], incoming.caller
    with suppress(ValueError):
        # What the operator deploys runs all tenants' jobs.
        own = incoming.gateway.job_ids.made_here(job_id, caller.tenant) or not caller.owner
        return job_id if own else ""
    return ""


async def why_waits(broker: Broker, view: Snapshot, job: Job) -> str:
    """As the snapshot says; and whether it may be for ever."""
    why, reason = view.why_waiting(job), view.fleet.get("reasons", {}).get(job.function)
    if not (why and job.caller and reason and reason["code"] in AT_LIMIT):
        return why
    busy = await busy_with(broker, job)
    return f"{reason['message']}; {hint(busy)}" if busy else why


def hint(job_id: str) -> str:
    return (
        f"one of its replicas runs job {job_id}, which led to this call: should that wait for it, both wait for ever; "
        "a higher max_replicas or concurrency leaves room for such calls"
    )


async def tell_who_led(broker: Broker, job: NewJob) -> None:
    """The running job that led to this one, of the same function, is told: it may be waiting for itself."""
    if busy := await busy_with(broker, job):
        await broker.led_to(busy, job.id)


async def busy_with(broker: Broker, job: Job | NewJob) -> str:
    """The id of a running job of the same function among those that led to this one, "" for none."""
    caller = job.caller
    for _ in range(MOST_CALLERS):
        found = await broker.job(caller) if caller else None
        if found is None:
            break
        if found.function == job.function and found.state is JobState.RUNNING:
            return found.id
        caller = found.caller
    return ""
