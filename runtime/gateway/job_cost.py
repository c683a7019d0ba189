"""What a job costs: its usage at its function's price, as the ledger enters it."""

from stoker.queue.records import Job
from stoker.runtime.gateway.context import Gateway
from stoker.runtime.tenancy.ledger import entry_of
from stoker.runtime.tenancy.price import Price


async def cost_of(gateway: Gateway, job: Job) -> float | None:
    """US dollars; None while it isn't over. At today's price, where the bill has that of the job's end."""
    return cost_usd(job, await gateway.tenants.price(job.function)) if job.state.terminal else None


def cost_usd(job: Job, price: Price) -> float:
    record = {b"job": job.id, b"tenant": job.tenant, b"state": job.state, b"attempt": str(job.attempt)}
    fields = {name: value.encode() for name, value in record.items()} | {b"usage": job.usage or b""}
    if job.metered:
        fields[b"late"] = b"1"
    return entry_of(job.function, "0-0", fields, price).micro_usd / 1e6
