"""Runs a gateway until it is told to stop."""

import gc

import uvicorn

from stoker.runtime.gateway.app import create_app
from stoker.runtime.gateway.settings import GatewaySettings

KEEP_ALIVE_S = 75
SHUTDOWN_S = 30


def server(settings: GatewaySettings, host: str, port: int) -> uvicorn.Server:
    config = uvicorn.Config(
        create_app(settings),
        host=host,
        port=port,
        log_level="warning",
        access_log=False,
        ws="none",
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=SHUTDOWN_S,
    )
    return uvicorn.Server(config)


def serve(settings: GatewaySettings, host: str, port: int) -> None:
    """Blocks. SIGTERM and SIGINT let answers under way finish for `SHUTDOWN_S` seconds."""
    ready = server(settings, host, port)
    # What was made so far stays: without it, each full collection in the middle of a stream is short.
    gc.collect()
    gc.freeze()
    ready.run()
