"""`stoker logs`."""

import json
import time
from collections.abc import Iterator
from typing import Annotated, Any

import typer
from rich.text import Text

from stoker.runtime.client.paths import function_path
from stoker.runtime.commands.exits import interruptible
from stoker.runtime.commands.terminal import GATEWAY_URL, ApiKey, FunctionName, Url, client_of, moment, screen

STYLES = {"stderr": "red", "stoker": "dim"}


def logs(
    function: FunctionName,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with lines as they come.")] = False,
    job: Annotated[str, typer.Option(help="Only lines of the job of this id; followed, up to its end.")] = "",
    replica: Annotated[str, typer.Option(help="Only lines of this replica.")] = "",
    since: Annotated[str, typer.Option(help="Only lines of the last 30s, 10m, 2h, 1d; or since a unix time.")] = "",
    url: Url = GATEWAY_URL,
    api_key: ApiKey = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print each line as JSON.")] = False,
) -> None:
    """What a function's workers wrote, and what happened to them; the last thousand lines, with times in UTC."""
    asked = {name: value for name, value in (("job", job), ("replica", replica), ("since", since)) if value}
    path = f"{function_path(function)}/logs"
    with interruptible(), client_of(url, api_key) as client:
        rows = followed(client, path, asked) if follow else client.request("GET", path, params=asked)["data"]
        for row in rows:
            if as_json:
                print(json.dumps(row, ensure_ascii=False), flush=True)
            else:
                screen().print(line_text(row), soft_wrap=True)


def followed(client: Any, path: str, asked: dict[str, str]) -> Iterator[dict[str, Any]]:
    """Goes on where it was when the connection to the gateway is lost."""
    from stoker.runtime.client.errors import Unreachable
    from stoker.runtime.client.patience import Patience

    patience, last = Patience(), ""
    while True:
        headers = {"accept": "text/event-stream"} | ({"last-event-id": last} if last else {})
        try:
            for event in client.stream_events("GET", path, params={**asked, "follow": "true"}, headers=headers):
                patience.heard()
                if event.name == "end":
                    return
                if not event.name:
                    last = event.id
                    yield event.data
            raise Unreachable(client.url, "the stream broke off")
        except Unreachable as error:
            time.sleep(patience.pause(error, time.monotonic()))


def line_text(row: dict[str, Any]) -> Text:
    clock = f"{moment(row['at'])}.{int(row['at'] * 1000) % 1000:03}Z"
    return Text.assemble((f"{clock} {row['replica']} ", "dim"), (row["text"], STYLES.get(row["stream"], "")))
