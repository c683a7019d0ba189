"""The gateway as an ASGI application."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.routing import Route
from starlette.types import ASGIApp

from stoker.runtime.gateway.batch_runner import driving_batches
from stoker.runtime.gateway.context import open_gateway
from stoker.runtime.gateway.dispatch import Dispatch
from stoker.runtime.gateway.envelope import Envelope
from stoker.runtime.gateway.routes import routes
from stoker.runtime.gateway.settings import GatewaySettings
from stoker.runtime.gateway.webhook_runner import delivering_webhooks


class Application(Starlette):
    """Envelope stands for Starlette's layers around each request, Dispatch for its walk through the routes."""

    def build_middleware_stack(self) -> ASGIApp:
        routes = [route for route in self.routes if isinstance(route, Route)]
        return Envelope(Dispatch(routes, others=self.router))


def create_app(settings: GatewaySettings) -> Starlette:
    """Connects when the server starts it and disconnects when the server stops it."""

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with open_gateway(settings) as gateway, driving_batches(gateway), delivering_webhooks(gateway):
            app.state.gateway = gateway
            yield

    return Application(routes=routes(), lifespan=lifespan)
