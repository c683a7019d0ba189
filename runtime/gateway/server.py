"""Runs a gateway until it is told to stop."""

import asyncio
import gc
import math
import socket

import uvicorn
from starlette.applications import Starlette

from stoker.runtime.gateway.app import create_app
from stoker.runtime.gateway.connection import Connection
from stoker.runtime.gateway.settings import GatewaySettings

KEEP_ALIVE_S = 75
# For answers to leave in, once no more of them are waited for.
LAST_ANSWERS_S = 5
YOUNG_OBJECTS = 10_000


class Server(uvicorn.Server):
    """Lets go of the calls that still wait a while after it was told to stop."""

    def __init__(self, config: uvicorn.Config, app: Starlette, drain_s: float) -> None:
        super().__init__(config)
        self._app = app
        self._drain_s = drain_s

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        asyncio.get_running_loop().call_later(self._drain_s, lambda: self._app.state.gateway.followings.let_go())
        await super().shutdown(sockets)


def server(settings: GatewaySettings, host: str, port: int) -> uvicorn.Server:
    app = create_app(settings)
    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        log_level="warning",
        access_log=False,
        http=Connection,
        ws="none",
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=math.ceil(settings.drain_s) + LAST_ANSWERS_S,
    )
    ready = Server(config, app, settings.drain_s)
    app.state.leaving = lambda: ready.should_exit
    return ready


def serve(settings: GatewaySettings, host: str, port: int) -> None:
    """Blocks. SIGTERM and SIGINT let answers under way finish for `drain_s`; who waits longer is told so."""
    ready = server(settings, host, port)
    # What was made so far stays, and requests leave next to no cycles: collections are short and few.
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS)
    ready.run()
