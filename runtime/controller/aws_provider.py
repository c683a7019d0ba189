"""Hosts from EC2 Auto Scaling groups: looks at them, carries out the policy's orders, and survives the end of the
controller at any point: what counts is in the groups and in the queue's server.

An old leader does no harm: every change is begun only while the lease is sure to outlast it, sets an absolute number or
names one host, and the groups protect every host that has work.
"""

import asyncio
import logging
import time
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any

from redis.exceptions import RedisError

from stoker.queue.cluster import Cluster, Host
from stoker.runtime.controller import fleet_plan
from stoker.runtime.controller.autoscaling import CHANGE_S, AutoScaling, CloudError
from stoker.runtime.controller.fleet_memory import FleetMemory, judge, observe, refused
from stoker.runtime.controller.fleet_plan import Call, LetGo, Orders, Protect, SetDesired, Terminate
from stoker.runtime.controller.fleet_view import fleet_of
from stoker.runtime.controller.groups import Group
from stoker.runtime.controller.leader import Leadership, NotLeading
from stoker.runtime.controller.provider import Fleet

TURN_S = 0.5
BUSY_LOOK_S = 1.0
CALM_LOOK_S = 15.0
BUSY_AFTER_CHANGE_S = 10.0
# A group's description may lag behind a termination that was accepted.
SHOWS_AFTER_S = 10.0
MAX_PAUSE_S = 30.0

log = logging.getLogger("stoker.aws")


class AwsProvider:
    """The groups that carry the tag `stoker:cluster` = `name`."""

    def __init__(self, cluster: Cluster, leadership: Leadership, name: str) -> None:
        self._cluster = cluster
        self._leadership = leadership
        self._cloud = AutoScaling(name)
        self._name = name
        self._orders = Orders()
        self._ordered = asyncio.Event()
        self._groups: Sequence[Group] = ()
        self._memory = FleetMemory()
        self._going: dict[str, float] = {}
        self._reported: frozenset[str] = frozenset()
        self._looked_at = 0.0
        self._look_number = 0
        self._changed_at = 0.0
        self._trouble = "the Auto Scaling groups have not been looked at yet"
        self._errors = 0

    def fleet(self, hosts: Mapping[str, Host]) -> Fleet:
        bodies = {id: host.body for id, host in hosts.items()}
        groups = marked(self._groups, self._going)
        fleet = fleet_of(groups, self._memory, bodies, time.monotonic(), time.time())
        return replace(fleet, trouble=self._trouble, look=self._look_number)

    def order(self, orders: Orders) -> None:
        if orders != self._orders:
            self._orders = orders
            self._ordered.set()

    async def run(self) -> None:
        while True:
            try:
                await self._turn()
                self._errors = 0
            except NotLeading:
                self._forget()
            except CloudError as error:
                self._errors += 1
                self._trouble = str(error)
                log.warning("%s", error)
            except RedisError as error:
                log.warning("queue: %s", error)
            except Exception:
                log.exception("turn failed")
            await self._pause()

    async def _pause(self) -> None:
        """After an error nothing wakes the provider early."""
        if self._errors:
            await asyncio.sleep(min(MAX_PAUSE_S, 2.0 ** (self._errors - 1)))
            return
        try:
            async with asyncio.timeout(TURN_S):
                await self._ordered.wait()
        except TimeoutError:
            return
        self._ordered.clear()

    def _forget(self) -> None:
        """What another leader does meanwhile isn't known."""
        self._groups, self._orders, self._looked_at = (), Orders(), 0.0

    async def _turn(self) -> None:
        if not self._leadership.fence:
            raise NotLeading
        hosts = await self._cluster.hosts()
        if self._is_due(frozenset(hosts)):
            await self._look(frozenset(hosts))
        bodies = {id: host.body for id, host in hosts.items()}
        orders = self._orders if self._orders.look == self._look_number else None
        errors = []
        for call in fleet_plan.plan(self._groups, self._memory, bodies, orders, time.time()):
            try:
                await finished(self._carry_out(call))
            except CloudError as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def _is_due(self, reporting: frozenset[str]) -> bool:
        age = time.monotonic() - self._looked_at
        return (
            age >= CALM_LOOK_S
            or (age >= BUSY_LOOK_S and (reporting != self._reported or self._is_busy()))
            or not self._looked_at
        )

    def _is_busy(self) -> bool:
        if time.monotonic() - self._changed_at < BUSY_AFTER_CHANGE_S:
            return True
        settled = all(len(group.live) == len(group.instances) == group.desired for group in self._groups)
        return not settled or any(not sighting.seen for sighting in self._memory.machines.values())

    async def _look(self, reporting: frozenset[str]) -> None:
        known = FleetMemory.from_dict(await self._cluster.fleet_memory())
        groups = await self._cloud.groups()
        if not groups:
            self._groups = ()
            raise CloudError(f"no Auto Scaling group has the tag stoker:cluster={self._name}; see terraform/README.md")
        now = time.time()
        memory = observe(known, groups, reporting, now)
        for group in groups:
            if len(group.live) < group.desired and memory.pool(group.pool).retry_at <= now:
                memory = judge(memory, group, await self._cloud.failed_launches(group.name), now)
        await self._remember(memory, known)
        self._going = {id: at for id, at in self._going.items() if time.monotonic() - at < SHOWS_AFTER_S}
        self._groups, self._reported = marked(groups, self._going), reporting
        self._looked_at, self._trouble = time.monotonic(), ""
        self._look_number += 1

    async def _remember(self, memory: FleetMemory, known: FleetMemory) -> None:
        if memory != known and not await self._cluster.write_fleet_memory(self._leadership.candidate, memory.to_dict()):
            raise NotLeading
        self._memory = memory

    async def _carry_out(self, call: Call) -> None:
        """One change; the groups are looked at again before the next turn plans another."""
        begin_by = await self._leadership.confirm(CHANGE_S)
        self._changed_at, self._looked_at = time.monotonic(), 0.0
        match call:
            case SetDesired(group, hosts, before):
                log.info("%s: %d hosts instead of %d", group.pool, hosts, before)
                await self._set_desired(call, begin_by)
            case Terminate(group, instance, why):
                log.info("%s: terminating %s: %s", group.pool, instance, why)
                await self._terminate(instance, begin_by)
            case LetGo(group, instance):
                log.info("%s: %s has drained", group.pool, instance)
                await self._cloud.let_go(group.name, instance, begin_by)
            case Protect(group, instances, protected):
                await self._cloud.protect(group.name, list(instances), protected, begin_by)

    async def _terminate(self, instance: str, begin_by: float) -> None:
        self._going[instance] = time.monotonic()
        try:
            await self._cloud.terminate(instance, begin_by)
        except CloudError:
            del self._going[instance]
            raise

    async def _set_desired(self, call: SetDesired, begin_by: float) -> None:
        """That more were asked for is written down first: the launches that fail from then on are counted."""
        pool, before = call.group.pool, self._memory
        if call.raises:
            asked = replace(before.pool(pool), asked_at=time.time())
            await self._remember(before.with_pool(pool, asked), before)
        try:
            await self._cloud.set_desired(call.group.name, call.hosts, begin_by)
        except CloudError as error:
            if not error.refusal:
                raise
            log.warning("%s: %s", pool, error)
            refusing = refused(self._memory.pool(pool), str(error), time.time())
            await self._remember(self._memory.with_pool(pool, refusing), self._memory)


async def finished(work: Coroutine[Any, Any, None]) -> None:
    """What runs in a thread can't be taken back: who is cancelled meanwhile waits for its end."""
    task = asyncio.create_task(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise


def marked(groups: Sequence[Group], going: Mapping[str, float]) -> list[Group]:
    """Instances that were told to go count as leaving, whatever the group still says."""
    return [
        replace(
            group,
            instances=tuple(replace(each, state="leaving") if each.id in going else each for each in group.instances),
        )
        for group in groups
    ]
