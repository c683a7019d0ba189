"""Health, metrics, the API's description, and a page for people."""

import asyncio

from jinja2 import Environment
from redis.exceptions import RedisError
from starlette.responses import HTMLResponse, Response

from stoker.queue.retry import AWAY
from stoker.runtime.gateway.deploy_routes import function_object
from stoker.runtime.gateway.endpoint import Incoming, Json
from stoker.runtime.gateway.metrics import CONTENT_TYPE

PING_TIMEOUT_S = 2.0

PAGE = Environment(autoescape=True).from_string("""<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta http-equiv="refresh" content="5">
<title>stoker</title>
<style>
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 60rem; padding: 0 1rem }
table { border-collapse: collapse; width: 100% }
th, td { border-bottom: 1px solid #ccc; padding: .3rem .6rem; text-align: left }
</style>
<h1>stoker</h1>
<h2>Functions</h2>
<table>
<tr><th>name</th><th>kind</th><th>version</th><th>replicas</th><th>waiting</th><th>running</th></tr>
{% for f in functions %}<tr><td>{{ f.name }}</td><td>{{ f.kind }}</td><td>{{ f.version }}</td>
<td>{% for state, count in f.replicas.items() %}{{ count }} {{ state }} {% else %}asleep{% endfor %}</td>
<td>{{ f.queued }}</td><td>{{ f.running }}</td></tr>
{% else %}<tr><td colspan="6">Nothing is deployed.</td></tr>
{% endfor %}</table>
<h2>Hosts</h2>
<table>
<tr><th>id</th><th>device</th><th>replicas</th></tr>
{% for h in hosts %}<tr><td>{{ h.id }}</td><td>{{ h.device }}</td><td>{{ h.replicas|length }}</td></tr>
{% else %}<tr><td colspan="3">No host reports.</td></tr>
{% endfor %}</table>
<p><a href="/openapi.json">API</a> · <a href="/metrics">metrics</a> · <a href="/readyz">readiness</a></p>
</html>
""")


async def health(incoming: Incoming) -> Response:
    return await healthz(incoming)


async def healthz(incoming: Incoming) -> Response:
    """The process answers; says nothing about the queue."""
    return Json({"status": "ok"})


async def readyz(incoming: Incoming) -> Response:
    try:
        async with asyncio.timeout(PING_TIMEOUT_S):
            await incoming.gateway.redis.ping()  # type: ignore[misc]
    except (RedisError, TimeoutError) as error:
        return Json({"status": "unavailable", "reason": f"queue: {error}"}, status_code=503)
    return Json({"status": "ready"})


async def metrics(incoming: Incoming) -> Response:
    """Without the queue this process's own numbers are still there."""
    gateway = incoming.gateway
    try:
        view = await gateway.view.snapshot()
    except AWAY:
        view = None
    return Response(gateway.metrics.render(view), media_type=CONTENT_TYPE)


async def page(incoming: Incoming) -> Response:
    view = await incoming.gateway.view.snapshot()
    functions = [function_object(spec, view) for spec in view.functions.values()]
    return HTMLResponse(PAGE.render(functions=functions, hosts=view.hosts))
