"""The gateway as an ASGI application."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware

from stoker.runtime.gateway.batch_runner import driving_batches
from stoker.runtime.gateway.context import open_gateway
from stoker.runtime.gateway.envelope import Envelope, unrouted
from stoker.runtime.gateway.routes import routes
from stoker.runtime.gateway.settings import GatewaySettings


def create_app(settings: GatewaySettings) -> Starlette:
    """Connects when the server starts it and disconnects when the server stops it."""

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with open_gateway(settings) as gateway, driving_batches(gateway):
            app.state.gateway = gateway
            yield

    app = Starlette(
        routes=routes(),
        middleware=[Middleware(Envelope)],
        exception_handlers={HTTPException: unrouted},
        lifespan=lifespan,
    )
    app.router.redirect_slashes = False
    return app
