"""The route table: what the application serves, and what /openapi.json is made from."""

from functools import cache
from itertools import groupby
from typing import Any

from starlette.responses import Response
from starlette.routing import Route

from stoker.runtime.gateway import (
    app_routes,
    deploy_routes,
    embedding_routes,
    function_routes,
    job_routes,
    openai_routes,
    system_routes,
)
from stoker.runtime.gateway.answers import ChatCompletion, Completion, ModelList, ModelObject
from stoker.runtime.gateway.app_routes import AppObject, AppRequest
from stoker.runtime.gateway.batch_routes import BATCH_ENDPOINTS
from stoker.runtime.gateway.deploy_routes import (
    BundleObject,
    DeletedFunction,
    DeployRequest,
    FunctionList,
    FunctionObject,
)
from stoker.runtime.gateway.embeddings import EmbeddingList, EmbeddingRequest
from stoker.runtime.gateway.endpoint import EVENT_STREAM, Endpoint, Incoming, Json, Resource
from stoker.runtime.gateway.file_routes import FILE_ENDPOINTS
from stoker.runtime.gateway.fleet_routes import FLEET_ENDPOINTS
from stoker.runtime.gateway.job_object import JobObject, JobPage, SubmittedJob
from stoker.runtime.gateway.openapi import describe
from stoker.runtime.gateway.schema import ChatRequest, CompletionRequest
from stoker.runtime.gateway.tenant_endpoints import TENANT_ENDPOINTS
from stoker.runtime.gateway.usage_routes import USAGE_ENDPOINTS

NO_FUNCTION = {404: "There is no such function."}
NO_JOB = {404: "There is no such job.", 410: "The job's result is no longer kept."}
CALLS = {
    404: "There is no such function.",
    409: "The idempotency key was used with a different body.",
    429: "Too many jobs wait; see Retry-After.",
    500: "The function failed.",
    503: "The function's workers can't start; see Retry-After.",
    504: "A time limit passed.",
}
KEY = {"Idempotency-Key": "The same key and body give the first request's answer; the job then outlives its client."}
PAGE = {"limit": "At most so many, 1 to 100; 20 if left out.", "after": "Go on behind the job of this id."}
PREFER = {
    "Prefer": "wait=N answers 202 after N seconds without a result, respond-async at once.",
    "Accept": "text/event-stream streams what a generator yields.",
}


@cache
def description() -> dict[str, Any]:
    return describe(ENDPOINTS)


async def openapi(incoming: Incoming) -> Response:
    return Json(description())


def routes() -> list[Route]:
    """One route per path; `Resource` tells the methods apart."""
    by_path = groupby(sorted(ENDPOINTS, key=lambda endpoint: endpoint.path), key=lambda endpoint: endpoint.path)
    return [Route(path, Resource(list(endpoints))) for path, endpoints in by_path]


ENDPOINTS = [
    Endpoint(
        "POST",
        "/v1/chat/completions",
        openai_routes.chat_completions,
        "invoke",
        "Answer a conversation; a stream of chunks with `stream: true`.",
        "OpenAI",
        request=ChatRequest,
        answer=ChatCompletion,
        problems=CALLS,
        reads=KEY,
    ),
    Endpoint(
        "POST",
        "/v1/completions",
        openai_routes.completions,
        "invoke",
        "Continue a text; without `max_tokens` up to the end of the context.",
        "OpenAI",
        request=CompletionRequest,
        answer=Completion,
        problems=CALLS,
        reads=KEY,
    ),
    Endpoint(
        "POST",
        "/v1/embeddings",
        embedding_routes.embeddings,
        "invoke",
        "Unit vectors of texts.",
        "OpenAI",
        request=EmbeddingRequest,
        answer=EmbeddingList,
        problems=CALLS,
        reads=KEY,
    ),
    Endpoint(
        "GET",
        "/v1/models",
        openai_routes.list_models,
        "invoke",
        "Deployed language models.",
        "OpenAI",
        answer=ModelList,
    ),
    Endpoint(
        "GET",
        "/v1/models/{model}",
        openai_routes.get_model,
        "invoke",
        "One language model.",
        "OpenAI",
        answer=ModelObject,
        problems=NO_FUNCTION,
    ),
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
    ),
    Endpoint(
        "PUT",
        "/v1/functions/{name}",
        deploy_routes.put_function,
        "deploy",
        "Deploy a function, or a new version of it.",
        "Functions",
        request=DeployRequest,
        answer=FunctionObject,
        others={201: FunctionObject},
    ),
    Endpoint(
        "DELETE",
        "/v1/functions/{name}",
        deploy_routes.delete_function,
        "deploy",
        "Remove a function and cancel its jobs.",
        "Functions",
        answer=DeletedFunction,
        problems=NO_FUNCTION,
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
        problems=CALLS,
        reads={**KEY, **PREFER},
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
        problems=CALLS,
        reads=KEY,
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
        problems=CALLS,
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
    ),
    Endpoint(
        "POST",
        "/v1/jobs/{id}/replay",
        job_routes.replay_job,
        "invoke",
        "Queue a dead or failed job again, with all of its attempts.",
        "Jobs",
        answer=JobObject,
        problems={**NO_JOB, 409: "The job is neither dead nor failed."},
        reads={"Idempotency-Key": "Sent again with the same key, it replays once."},
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
    *USAGE_ENDPOINTS,
]
