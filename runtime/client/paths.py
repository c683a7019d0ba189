"""Where things of a name are: all raise BadName for what would be another path."""

from urllib.parse import quote

from stoker.runtime.client.errors import BadName


def function_path(name: str) -> str:
    return f"/v1/functions/{part('function name', name)}"


def job_path(job_id: str) -> str:
    return f"/v1/jobs/{part('job id', job_id)}"


def app_path(name: str) -> str:
    return f"/v1/apps/{part('app name', name)}"


def tenant_path(name: str) -> str:
    return f"/v1/tenants/{part('tenant name', name)}"


def key_path(tenant: str, key_id: str) -> str:
    return f"{tenant_path(tenant)}/keys/{part('key id', key_id)}"


def secret_path(name: str) -> str:
    return f"/v1/secrets/{part('secret name', name)}"


def price_path(function: str) -> str:
    return f"/v1/prices/{part('function name', function)}"


def part(what: str, text: str) -> str:
    if "/" in text or text in ("", ".", ".."):
        raise BadName(f"{text!r} is no {what}")
    return quote(text, safe="")
