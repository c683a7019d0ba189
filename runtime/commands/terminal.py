"""What the commands share: where they print, the options they have in common, and the client they call with."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

console = Console()
errors = Console(stderr=True)

Url = Annotated[str, typer.Option("--url", envvar="STOKER_URL", help="The gateway's address.")]
ApiKey = Annotated[str, typer.Option("--api-key", envvar="STOKER_API_KEY", help="Key of the calling tenant.")]
FunctionName = Annotated[str, typer.Argument(help="Name of a deployed function.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
DataDir = Annotated[Path | None, typer.Option("--data", help="Folder of this machine's data (STOKER_DATA).")]
Redis = Annotated[str, typer.Option("--redis", help="redis://, rediss:// or unix:// address of an own server.")]
Store = Annotated[str, typer.Option("--store", help="Object store: file:///folder or s3://bucket/prefix.")]
CacheDir = Annotated[Path | None, typer.Option("--cache", help="Folder that keeps buckets' weights (STOKER_CACHE).")]
CacheSize = Annotated[float | None, typer.Option("--cache-gb", min=0, help="Its size in GB, by default 50; 0: none.")]
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
    from stoker.runtime.sdk import Client

    return Client(url, api_key)


def show(value: Any, as_json: bool, text: str) -> None:
    typer.echo(json.dumps(value) if as_json else text)
