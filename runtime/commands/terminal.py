"""What the commands share: where they print, the options they have in common, and the client they call with."""

import base64
import json
import math
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

PIPE_WIDTH = 1 << 16
PROSE_WIDTH = 24
# Of many things in one line.
NAMED = 3

errors = Console(stderr=True)

Url = Annotated[str, typer.Option("--url", envvar="STOKER_URL", help="The gateway's address.")]
ApiKey = Annotated[str, typer.Option("--api-key", envvar="STOKER_API_KEY", help="Key of the calling tenant.")]
COMPLETION_PATIENCE_S = 0.5


def deployed_names(incomplete: str) -> list[str]:
    """For the shell's completion: quickly, or none."""
    from stoker.runtime.client.client import Client

    with suppress(Exception), Client(timeout=COMPLETION_PATIENCE_S) as client:
        return [row["name"] for row in client.functions() if row["name"].startswith(incomplete)]
    return []


FunctionName = Annotated[str, typer.Argument(help="Name of a deployed function.", autocompletion=deployed_names)]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
DataDir = Annotated[Path | None, typer.Option("--data", help="Folder of this machine's data (STOKER_DATA).")]
Redis = Annotated[str, typer.Option("--redis", help="redis://, rediss:// or unix:// address of an own server.")]
Store = Annotated[str, typer.Option("--store", help="Object store: file:///folder or s3://bucket/prefix.")]
CacheDir = Annotated[Path | None, typer.Option("--cache", help="Folder that keeps buckets' weights (STOKER_CACHE).")]
CacheSize = Annotated[float | None, typer.Option("--cache-gb", min=0, help="Its size in GB, by default 50; 0: none.")]
DeviceMemory = Annotated[
    float | None,
    typer.Option(
        "--device-memory-gb", min=0, help="Of each device, for all language models; 0: all (STOKER_DEVICE_MEMORY_GB)."
    ),
]
RingSize = Annotated[
    int | None, typer.Option("--ring-mb", min=32, help="Memory that weights pass through, in MiB (STOKER_RING_MB).")
]
PeerPort = Annotated[
    int,
    typer.Option(min=0, max=65535, help="Offer kept weights here to hosts that know STOKER_SECRET."),
]
Auth = Annotated[str, typer.Option(help="'keys': callers need an API key; 'open': on loopback the default.")]

GATEWAY_URL = "http://127.0.0.1:8000"


def client_of(url: str, api_key: str) -> Any:
    from stoker.runtime.client.client import Client

    return Client(url, api_key)


def show(value: Any, as_json: bool, text: str) -> None:
    typer.echo(json_text(value) if as_json else text)


def json_text(value: Any, **options: Any) -> str:
    """As the gateway would say it in JSON."""
    return json.dumps(printable(value), **options)


def printable(value: Any) -> Any:
    """Bytes as {"$bytes": base64}, arrays as nested lists, NaN and infinities as null."""
    if isinstance(value, dict):
        return {key: printable(part) for key, part in value.items()}
    if isinstance(value, list):
        return [printable(part) for part in value]
    if isinstance(value, bytes):
        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return printable(value.tolist()) if hasattr(value, "tolist") else value


def shortened(texts: Sequence[str], between: str = ", ") -> str:
    """The first few, and how many there are besides."""
    left_out = len(texts) - NAMED
    return between.join(texts[:NAMED]) + (f" and {left_out} more" if left_out > 0 else "")


def moment(seconds: float) -> str:
    """In UTC, which what it stands below or beside says."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(seconds))


def screen() -> Console:
    """Standard output: as wide as the terminal, and without an end where there is none."""
    console = Console()
    return console if console.is_terminal else Console(width=PIPE_WIDTH)


def print_table(headers: Sequence[str], rows: Sequence[Sequence[object]], prose: Collection[str] = ()) -> None:
    """Nothing is ever cut: only columns named in `prose` wrap, and on a terminal that is too narrow for the others each
    row is printed as lines of its own."""
    texts = [[str(cell) for cell in row] for row in rows]
    console = screen()
    if least_width(headers, texts, prose) > console.width:
        console.print(Text("\n\n".join(as_lines(headers, row) for row in texts), overflow="fold"))
        return
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for header, *cells in zip(headers, *texts, strict=True):
        justify = "right" if cells and all(map(is_number, cells)) else "left"
        table.add_column(header, justify=justify, no_wrap=header not in prose, overflow="fold")
    for row in texts:
        table.add_row(*map(Text, row))
    console.print(table)


def least_width(headers: Sequence[str], rows: Sequence[Sequence[str]], prose: Collection[str]) -> int:
    """Columns with two characters of space between them."""
    widths = [max(map(cell_len, cells)) for cells in zip(headers, *rows, strict=True)]
    limits = [PROSE_WIDTH if header in prose else width for header, width in zip(headers, widths, strict=True)]
    return sum(min(pair) + 2 for pair in zip(widths, limits, strict=True)) - 2


def is_number(cell: str) -> bool:
    return not cell or cell.replace(".", "", 1).isdecimal()


def as_lines(headers: Sequence[str], row: Sequence[str]) -> str:
    margin = max(map(cell_len, headers)) + 2
    return "\n".join(f"{header:<{margin}}{cell}".rstrip() for header, cell in zip(headers, row, strict=True))
