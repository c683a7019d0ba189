"""What a fetch is limited by, and how near it came to that."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stoker.coldstart.sources import CACHE

NETWORKS = Path("/sys/class/net")


def fetch_limit(summary: Mapping[str, Any], local: bool, network_bytes_s: float) -> dict[str, Any]:
    """What a fetch was limited by, from its fetcher's summary: "consumer" (chunks waited for slots more than half the
    time), "disk" (most bytes came from this host's), "store" (which asked to slow down) or "network", with the known
    limit in GB/s and the share of it that was reached."""
    sources: Mapping[str, Mapping[str, Any]] = summary["sources"]
    most = max(sources, key=lambda name: sources[name]["bytes"], default="")
    if summary["slot_wait_s"] > summary["seconds"] / 2:
        return {"limit": "consumer"}
    if local or most == CACHE:
        return {"limit": "disk"}
    if summary["refusals"]:
        return {"limit": "store"}
    if not network_bytes_s or not summary["seconds"]:
        return {"limit": "network"}
    reached = summary["bytes"] / summary["seconds"] / network_bytes_s
    return {"limit": "network", "limit_gb_s": network_bytes_s / 1e9, "reached": round(reached, 3)}


def network_bytes_s(folder: Path = NETWORKS) -> float:
    """The fastest network interface that is up, as its driver says; 0 when none does."""
    return max((interface_megabits(path) for path in folder.glob("*/speed")), default=0) * 1e6 / 8


def interface_megabits(path: Path) -> int:
    try:
        return max(0, int(path.read_text()))
    except (OSError, ValueError):
        return 0
