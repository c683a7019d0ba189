"""A fetch names what it was limited by."""

from pathlib import Path
from typing import Any

from stoker.coldstart.limits import fetch_limit, network_bytes_s


def summary(**changes: Any) -> dict[str, Any]:
    sources = {"store": {"bytes": 90}, "cache": {"bytes": 10}}
    return {"seconds": 2.0, "bytes": 2e9, "slot_wait_s": 0.1, "refusals": 0, "sources": sources, **changes}


def test_limits_of_a_fetch():
    assert fetch_limit(summary(), False, 12.5e9) == {"limit": "network", "limit_gb_s": 12.5, "reached": 0.08}
    assert fetch_limit(summary(), False, 0.0) == {"limit": "network"}
    assert fetch_limit(summary(), True, 12.5e9) == {"limit": "disk"}
    assert fetch_limit(summary(sources={"cache": {"bytes": 1}}), False, 0.0) == {"limit": "disk"}
    assert fetch_limit(summary(refusals=3), False, 12.5e9) == {"limit": "store"}
    assert fetch_limit(summary(slot_wait_s=1.5), False, 12.5e9) == {"limit": "consumer"}
    assert fetch_limit(summary(sources={}, seconds=0.0, slot_wait_s=0.0), False, 1.0) == {"limit": "network"}


def test_the_fastest_interface_counts(tmp_path: Path):
    assert network_bytes_s(tmp_path) == 0
    for name, speed in (("eth0", "25000\n"), ("eth1", "10000\n"), ("docker0", "-1\n"), ("odd", "?")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "speed").write_text(speed)
    assert network_bytes_s(tmp_path) == 25e9 / 8
