"""Row 19: every change by a key of an operator or a deployer is on record; reading and invoking are not changes."""

import httpx
import pytest

from stoker.runtime.gateway.audit_routes import audited
from stoker.runtime.gateway.routes import ENDPOINTS
from tests.runtime.gateway.conftest import Login
from tests.runtime.gateway.peers import make_key


def test_every_route_that_changes_the_deployment_is_audited() -> None:
    changes = [each for each in ENDPOINTS if each.access in ("admin", "deploy") and each.method != "GET"]
    assert changes and all(audited(each).handler is not each.handler for each in changes)
    others = [each for each in ENDPOINTS if each not in changes]
    assert all(audited(each) is each for each in others)


@pytest.mark.usefixtures("store")
async def test_changes_are_on_record_with_who_made_them(login: Login, root: httpx.AsyncClient) -> None:
    made = await make_key(root, "acme", "invoke", "deploy")
    acme = login(made["key"])
    await acme.delete("/v1/functions/nothing")
    await acme.get("/v1/functions")
    await root.put("/v1/prices/*", json={"request": 1})
    await root.delete("/v1/prices/*")
    found = (await root.get("/v1/audit", params={"limit": 4})).json()
    assert found["first_broken"] == 0
    rows = [(row["tenant"], row["key_id"], row["action"], row["target"], row["status"]) for row in found["data"]]
    assert rows[:3] == [
        ("default", "root", "DELETE /v1/prices/{function}", {"function": "*"}, 200),
        ("default", "root", "PUT /v1/prices/{function}", {"function": "*"}, 200),
        ("default", "root", "POST /v1/tenants/{name}/keys", {"name": "acme"}, 201),
    ]
    assert made["key"] not in str(found)
    assert (await acme.get("/v1/audit")).status_code == 403
