"""The part of the route table that is about tenants and keys."""

from stoker.runtime.gateway import tenant_routes as routes
from stoker.runtime.gateway.endpoint import Endpoint

NO_TENANT = {404: "There is no such tenant."}
NO_KEY = {404: "There is no such tenant, or it has no such key."}
TENANT, KEYS = "/v1/tenants/{name}", "/v1/tenants/{name}/keys"

TENANT_ENDPOINTS = [
    Endpoint("GET", "/v1/tenants", routes.list_tenants, "admin", "All tenants.", "Tenants", answer=routes.TenantList),
    Endpoint(
        "GET",
        TENANT,
        routes.get_tenant,
        "admin",
        "One tenant.",
        "Tenants",
        answer=routes.TenantObject,
        problems=NO_TENANT,
    ),
    Endpoint(
        "PUT",
        TENANT,
        routes.put_tenant,
        "admin",
        "Create a tenant, or set all of its limits anew.",
        "Tenants",
        request=routes.TenantRequest,
        answer=routes.TenantObject,
        others={201: routes.TenantObject},
    ),
    Endpoint(
        "PATCH",
        TENANT,
        routes.patch_tenant,
        "admin",
        "Change some of a tenant's limits.",
        "Tenants",
        request=routes.TenantRequest,
        answer=routes.TenantObject,
        problems=NO_TENANT,
    ),
    Endpoint(
        "DELETE",
        TENANT,
        routes.delete_tenant,
        "admin",
        "Remove a tenant and its keys.",
        "Tenants",
        answer=routes.DeletedTenant,
        problems=NO_TENANT,
    ),
    Endpoint(
        "GET", KEYS, routes.list_keys, "admin", "A tenant's keys.", "Tenants", answer=routes.KeyList, problems=NO_TENANT
    ),
    Endpoint(
        "POST",
        KEYS,
        routes.post_key,
        "admin",
        "Make a key; its text is in this answer and nowhere else.",
        "Tenants",
        request=routes.KeyRequest,
        answer=routes.KeyObject,
        status=201,
        problems=NO_TENANT,
    ),
    Endpoint(
        "POST",
        KEYS + "/{key}/rotate",
        routes.rotate_key,
        "admin",
        "Make a key that replaces this one after an overlap.",
        "Tenants",
        request=routes.RotateRequest,
        answer=routes.KeyObject,
        status=201,
        problems=NO_KEY,
    ),
    Endpoint(
        "DELETE",
        KEYS + "/{key}",
        routes.delete_key,
        "admin",
        "Revoke a key.",
        "Tenants",
        answer=routes.DeletedKey,
        problems=NO_KEY,
    ),
]
