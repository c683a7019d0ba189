"""What goes with a tenant: its work stops, and nobody who gets its name later finds anything of its own. Its usage
stays in the books. (A key that is revoked alone stops nothing: a call under way may finish, as its jobs may.)"""

import asyncio

from stoker.queue.cluster import Change
from stoker.queue.listing import Place
from stoker.queue.records import JobState
from stoker.runtime.gateway.auth import FRESH_S
from stoker.runtime.gateway.context import Gateway
from stoker.runtime.gateway.deploy_routes import forget
from stoker.runtime.spec import owner_of
from stoker.runtime.stored_prompts import forget_all

PAGE, REASON = 200, "the tenant was removed"


async def remove_tenant(gateway: Gateway, name: str) -> bool:
    """False when there is none. Its record goes last, so that a removal that was interrupted can be asked for again;
    what still comes through gateways that believed its keys for a moment longer goes after it."""
    if await gateway.tenants.get(name) is None:
        return False
    await gateway.tenants.revoke_all(name)
    await remove_belongings(gateway, name)
    await gateway.webhooks.forget(name)
    await gateway.tenants.remove(name)
    gateway.background(remove_latecomers(gateway, name))
    return True


async def remove_latecomers(gateway: Gateway, name: str) -> None:
    await asyncio.sleep(2 * FRESH_S)
    if await gateway.tenants.get(name) is None:
        await remove_belongings(gateway, name)


async def cancel_jobs(gateway: Gateway, name: str) -> None:
    """Of any function. What is claimed or tried again between the pages is in those of a later state."""
    functions = await gateway.broker.functions_with_work()
    for state in (JobState.QUEUED, JobState.RETRYING, JobState.RUNNING):
        place: Place | None = None
        while True:
            page = await gateway.listing.page(functions, PAGE, place, tenant=name, state=state)
            await asyncio.gather(*(gateway.broker.cancel(job.id, REASON) for job in page.jobs))
            if (place := page.next) is None:
                break


async def remove_belongings(gateway: Gateway, name: str) -> None:
    own = [function for function in await gateway.cluster.functions() if owner_of(function) == name]
    if own:
        await gateway.registry.change("", lambda *_: Change({}, own))
    await gateway.cluster.forget_apps([app for app in await gateway.cluster.apps() if owner_of(app) == name])
    await gateway.batches.remove_all(name)
    await cancel_jobs(gateway, name)
    await gateway.vault.remove(name, *await gateway.vault.names(name))
    await asyncio.to_thread(gateway.files.remove_all, name)
    # Its prompts are among those of others there, and in replicas that have not fallen asleep yet.
    await gateway.cluster.end_era()
    await asyncio.to_thread(forget_all, gateway.store)
    await asyncio.gather(*(forget(gateway, function) for function in own))
    for function in own:
        await gateway.tenants.remove_price(function)
