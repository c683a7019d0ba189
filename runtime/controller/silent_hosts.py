"""Hosts that have replicas and don't report. Others serve meanwhile, but what such a host has stays its own for a
while: else a queue server that was away for seconds, or a busy host, would cost every model its place."""

import logging
from collections.abc import Collection, Mapping

from stoker.runtime.controller.policy import Wanted

SPARED_S = 12.0

log = logging.getLogger("stoker.controller")


def silent_since(wanted: Wanted, hosts: Collection[str], before: Mapping[str, float], now: float) -> dict[str, float]:
    """Host -> when it was first missed."""
    return {host: before.get(host, now) for host in wanted if host not in hosts}


def spared(wanted: Wanted, since: Mapping[str, float], now: float) -> Wanted:
    """What silent hosts have, as long as they may come back to it."""
    return {host: wanted[host] for host, missed in since.items() if now - missed < SPARED_S}


def tell(since: Collection[str], before: Collection[str], hosts: Collection[str]) -> None:
    for host in sorted(set(since) - set(before)):
        log.warning("%s doesn't report: its replicas are kept for it for %g s, others serve meanwhile", host, SPARED_S)
    for host in sorted(set(before) & set(hosts)):
        log.info("%s reports again", host)
