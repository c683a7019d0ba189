"""The route table: what the application serves, and what /openapi.json is made from."""

from functools import cache
from itertools import groupby
from typing import Any

from starlette.responses import Response
from starlette.routing import Route

from stoker.runtime.gateway import (
    app_routes,
    deploy_routes,
    function_routes,
    job_routes,
    system_routes,
)
from stoker.runtime.gateway.app_routes import AppObject, AppRequest, DeletedApp
from stoker.runtime.gateway.audit_routes import AUDIT_ENDPOINTS, audited
from stoker.runtime.gateway.batch_routes import BATCH_ENDPOINTS
from stoker.runtime.gateway.calling_jobs import NAMED
from stoker.runtime.gateway.deploy_routes import (
    BundleObject,
    DeletedFunction,
    DeployRequest,
    FunctionList,
    FunctionObject,
)
from stoker.runtime.gateway.endpoint import EVENT_STREAM, Endpoint, Incoming, Json, Resource
from stoker.runtime.gateway.file_routes import FILE_ENDPOINTS
from stoker.runtime.gateway.fleet_routes import FLEET_ENDPOINTS
from stoker.runtime.gateway.function_descriptions import visible_functions, with_functions
from stoker.runtime.gateway.job_list import JOB_LIST_ENDPOINTS
from stoker.runtime.gateway.job_object import JobObject, JobPage, SubmittedJob
from stoker.runtime.gateway.job_result import RESULT_ENDPOINTS
from stoker.runtime.gateway.log_routes import LOG_ENDPOINTS
from stoker.runtime.gateway.openai_endpoints import CALLS, KEY, OPENAI_ENDPOINTS
from stoker.runtime.gateway.openapi import describe
from stoker.runtime.gateway.secret_routes import SECRET_ENDPOINTS
from stoker.runtime.gateway.start_routes import START_ENDPOINTS
from stoker.runtime.gateway.tenant_endpoints import TENANT_ENDPOINTS
from stoker.runtime.gateway.usage_routes import USAGE_ENDPOINTS
from stoker.runtime.gateway.version_routes import VERSION_ENDPOINTS
from stoker.runtime.gateway.webhook_endpoints import WEBHOOK_ENDPOINTS
from stoker.runtime.gateway.webhook_url import WEBHOOK

NO_FUNCTION = {404: "There is no such function."}
IN_USE = "A router names the function that would go or be of another kind."
NO_JOB = {404: "There is no such job.", 410: "The job's result is no longer kept."}
PAGE = {"limit": "At most so many, 1 to 100; 20 if left out.", "after": "Go on behind the job of this id."}
WAIT = {"Prefer": "wait=N answers when the job has ended, or after N seconds."}
PREFER = {
    "Prefer": "wait=N answers 202 after N seconds without a result, respond-async at once.",
    "Accept": "text/event-stream streams what a generator yields, application/msgpack keeps bytes and arrays.",
}


FUNCTION_CALLS = {**CALLS, 422: "The input doesn't fit the function's annotations; `param` is the path."}


@cache
def description() -> dict[str, Any]:
    return describe(ENDPOINTS)


async def openapi(incoming: Incoming) -> Response:
    return Json(with_functions(description(), await visible_functions(incoming)))


def routes() -> list[Route]:
    """One route per path; `Resource` tells the methods apart."""
    endpoints = sorted(map(audited, ENDPOINTS), key=lambda endpoint: endpoint.path)
    by_path = groupby(endpoints, key=lambda endpoint: endpoint.path)
    return [Route(path, Resource(list(endpoints))) for path, endpoints in by_path]


ENDPOINTS = [
    *OPENAI_ENDPOINTS,
    Endpoint(
        "GET",
        "/v1/functions",
        deploy_routes.list_functions,
        "invoke",
        "Deployed functions.",
        "Functions",
        answer=FunctionList,
    ),
    Endpoint(
        "GET",
        "/v1/functions/{name}",
        deploy_routes.get_function,
        "invoke",
        "One function, its replicas and its queue.",
        "Functions",
        answer=FunctionObject,
        problems=NO_FUNCTION,
    ),
    Endpoint(
        "PUT",
        "/v1/apps/{name}",
        app_routes.put_app,
        "deploy",
        "Deploy an app: all of its functions at once; those it no longer has are removed.",
        "Functions",
        request=AppRequest,
        answer=AppObject,
        problems={409: f"Another app has a function of that name. {IN_USE}"},
    ),
    Endpoint(
        "DELETE",
        "/v1/apps/{name}",
        app_routes.delete_app,
        "deploy",
        "Remove all functions of an app at once and cancel their jobs; a rollback brings them back.",
        "Functions",
        answer=DeletedApp,
        problems={404: "The caller has no such app.", 409: IN_USE},
    ),
    Endpoint(
        "PUT",
        "/v1/functions/{name}",
        app_routes.put_function,
        "deploy",
        "Deploy a function, or a new version of it.",
        "Functions",
        request=DeployRequest,
        answer=FunctionObject,
        others={201: FunctionObject},
        problems={409: IN_USE},
    ),
    Endpoint(
        "DELETE",
        "/v1/functions/{name}",
        deploy_routes.delete_function,
        "deploy",
        "Remove a function and cancel its jobs.",
        "Functions",
        answer=DeletedFunction,
        problems={**NO_FUNCTION, 409: IN_USE},
    ),
    Endpoint(
        "PUT",
        "/v1/bundles/{sha256}",
        deploy_routes.put_bundle,
        "deploy",
        "Store a zip of code under its SHA-256.",
        "Functions",
        answer=BundleObject,
        status=201,
        streams_body=True,
    ),
    Endpoint(
        "POST",
        "/v1/functions/{name}",
        function_routes.invoke,
        "invoke",
        "Call a function and wait for its result.",
        "Functions",
        request=Any,
        answer=Any,
        others={202: SubmittedJob},
        events=Any,
        problems=FUNCTION_CALLS,
        reads={**KEY, **PREFER, **WEBHOOK, **NAMED},
        packs=True,
    ),
    Endpoint(
        "POST",
        "/v1/functions/{name}/jobs",
        function_routes.post_job,
        "invoke",
        "Queue a job and return at once.",
        "Jobs",
        request=Any,
        answer=SubmittedJob,
        status=202,
        others={200: JobObject},
        problems=FUNCTION_CALLS,
        reads={**KEY, **WAIT, **WEBHOOK, **NAMED},
        packs=True,
    ),
    Endpoint(
        "PUT",
        "/v1/functions/{name}/jobs/{id}",
        function_routes.put_job,
        "invoke",
        "Queue a job once, however often this is sent: the id is the client's own and serves as idempotency key.",
        "Jobs",
        request=Any,
        answer=SubmittedJob,
        status=202,
        others={200: JobObject},
        problems=FUNCTION_CALLS,
        reads={**WAIT, **WEBHOOK, **NAMED},
        packs=True,
    ),
    Endpoint(
        "GET",
        "/v1/functions/{name}/jobs/{id}",
        job_routes.get_job,
        "invoke",
        "The job that was put under an id of the caller's own.",
        "Jobs",
        answer=JobObject,
        problems=NO_JOB,
        reads=WAIT,
        packs=True,
    ),
    Endpoint(
        "DELETE",
        "/v1/functions/{name}/jobs/{id}",
        job_routes.cancel_job,
        "invoke",
        "Cancel the job that was put under an id of the caller's own.",
        "Jobs",
        answer=JobObject,
        problems=NO_JOB,
        packs=True,
    ),
    Endpoint(
        "GET",
        "/v1/functions/{name}/dead",
        job_routes.dead_jobs,
        "invoke",
        "Jobs whose attempts are used up, the newest first.",
        "Jobs",
        answer=JobPage,
        problems=NO_FUNCTION,
        asks=PAGE,
    ),
    Endpoint(
        "GET",
        "/v1/jobs/{id}",
        job_routes.get_job,
        "invoke",
        "A job's state, why it waits, its timeline and its result.",
        "Jobs",
        answer=JobObject,
        problems=NO_JOB,
        reads=WAIT,
        packs=True,
    ),
    Endpoint(
        "DELETE",
        "/v1/jobs/{id}",
        job_routes.cancel_job,
        "invoke",
        "Cancel a job, waiting or running.",
        "Jobs",
        answer=JobObject,
        problems=NO_JOB,
        packs=True,
    ),
    Endpoint(
        "POST",
        "/v1/jobs/{id}/replay",
        job_routes.replay_job,
        "invoke",
        "Queue a dead or failed job again, with all of its attempts.",
        "Jobs",
        answer=JobObject,
        problems={**NO_JOB, 409: "The job is neither dead nor failed; one that ended otherwise has no input any more."},
        reads={"Idempotency-Key": "Sent again with the same key, it replays once."},
        packs=True,
    ),
    Endpoint(
        "GET",
        "/v1/jobs/{id}/events",
        job_routes.job_events,
        "invoke",
        "Follow a job; `Last-Event-ID` resumes.",
        "Jobs",
        others={204: None},
        problems=NO_JOB,
        reads={"Last-Event-ID": "Resume behind this event."},
        media=EVENT_STREAM,
    ),
    Endpoint(
        "GET", "/healthz", system_routes.healthz, "anyone", "The process is alive.", "System", answer=dict[str, str]
    ),
    Endpoint(
        "GET", "/readyz", system_routes.readyz, "anyone", "The queue can be reached.", "System", answer=dict[str, str]
    ),
    Endpoint("GET", "/metrics", system_routes.metrics, "admin", "Prometheus metrics.", "System", media="text/plain"),
    Endpoint("GET", "/openapi.json", openapi, "anyone", "This description.", "System"),
    Endpoint("GET", "/", system_routes.page, "admin", "A page for people.", "System", media="text/html"),
    *FILE_ENDPOINTS,
    *BATCH_ENDPOINTS,
    *TENANT_ENDPOINTS,
    *FLEET_ENDPOINTS,
    *LOG_ENDPOINTS,
    *VERSION_ENDPOINTS,
    *START_ENDPOINTS,
    *RESULT_ENDPOINTS,
    *SECRET_ENDPOINTS,
    *USAGE_ENDPOINTS,
    *JOB_LIST_ENDPOINTS,
    *WEBHOOK_ENDPOINTS,
    *AUDIT_ENDPOINTS,
]
