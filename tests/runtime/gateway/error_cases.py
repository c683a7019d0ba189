"""The errors that requests alone can provoke: what is sent, and the whole error object that comes back.

`<chat>`, `<embed>` and `<f>` stand for a deployed language model, an embedding model and a Python function; "…" in a
message for what another library says there. `as_` says who asks: `open` is a gateway without keys.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

Who = Literal["open", "nobody", "stranger", "admin", "invoke"]

INVALID = "invalid_request_error"
HELLO: list[Any] = [{"role": "user", "content": "Hello"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
NONE64 = "0" * 64
EMPTY_SHA = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"


@dataclass(frozen=True)
class Case:
    request: str
    status: int
    code: str | None
    param: str | None
    message: str
    json: Any = None
    type: str = INVALID
    as_: Who = "open"
    send: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.request} {self.status} {self.code} {self.param} {self.message[:40]}"


def chat(param: str | None, message: str, code: str | None = None, /, **fields: Any) -> Case:
    body = {"model": "<chat>", "messages": HELLO, **fields}
    return Case("POST /v1/chat/completions", 400, code, param, message, body)


def completion(param: str | None, message: str, code: str | None = None, /, **fields: Any) -> Case:
    body = {"model": "<chat>", "prompt": "Hello", **fields}
    return Case("POST /v1/completions", 400, code, param, message, body)


def response(param: str | None, message: str, code: str | None = None, /, **fields: Any) -> Case:
    return Case("POST /v1/responses", 400, code, param, message, {"model": "<chat>", "input": "Hello", **fields})


def embedding(param: str, message: str, code: str | None = None, /, **fields: Any) -> Case:
    return Case("POST /v1/embeddings", 400, code, param, message, {"model": "<embed>", "input": "a", **fields})


def deployment(param: str, message: str, code: str | None = None, /, **fields: Any) -> Case:
    spec = {"kind": "python", "code": NONE64, "entry": "m:f", **fields}
    return Case("PUT /v1/functions/new", 400, code, param, message, {"spec": spec})


def batch(status: int, code: str | None, param: str, message: str, **fields: Any) -> Case:
    body = {"endpoint": "/v1/completions", "input_file_id": "file-1", "completion_window": "24h", **fields}
    return Case("POST /v1/batches", status, code, param, message, body)


def tenant(param: str, message: str, code: str | None, body: Any, request: str = "PUT /v1/tenants/acme") -> Case:
    return Case(request, 400, code, param, message, body, as_="admin")


def missing(request: str, code: str, param: str | None, message: str, json: Any = None, as_: Who = "open") -> Case:
    return Case(request, 404, code, param, message, json, as_=as_)


def webhook(code: str, message: str, url: str) -> Case:
    send = {"headers": {"Webhook-URL": url}}
    return Case("POST /v1/functions/<f>/jobs", 400, code, "Webhook-URL", message, send=send)


SCHEMAS = [
    chat(
        "messages",
        "Invalid value for 'messages': List should have at least 1 item after validation, not 0.",
        messages=[],
    ),
    chat(
        "messages.0.role",
        "Invalid value for 'messages.0.role': Input should be 'system', 'developer', 'user', 'assistant' or 'tool'.",
        messages=[{"role": "x", "content": "a"}],
    ),
    chat(
        "messages.0.content.0.type",
        "Invalid value for 'messages.0.content.0.type': content of type 'image_url' is not supported, only 'text' is.",
        messages=[{"role": "user", "content": [{"type": "image_url"}]}],
    ),
    chat("n", "Invalid value for 'n': Input should be less than or equal to 32.", n=99),
    chat("temperature", "Invalid value for 'temperature': Input should be a valid number.", temperature="1"),
    chat("seed", "Invalid value for 'seed': Input should be less than 9223372036854775808.", seed=1 << 63),
    chat(
        "response_format",
        "Invalid value for 'response_format': type 'json_schema' needs a 'json_schema'.",
        response_format={"type": "json_schema"},
    ),
    chat(
        "structured_outputs",
        "Invalid value for 'structured_outputs': exactly one of 'json', 'regex', 'grammar' and 'choice' is needed.",
        structured_outputs={},
    ),
    chat(
        None,
        "'structured_outputs' and 'response_format' exclude each other",
        response_format={"type": "json_object"},
        structured_outputs={"regex": "a"},
    ),
    chat("stream_options", "'stream_options' is only allowed when 'stream' is true.", stream_options={}),
    chat("top_logprobs", "'top_logprobs' is only allowed when 'logprobs' is true.", top_logprobs=3),
    chat(
        "functions", "'functions' is not supported; leave it out or send [].", "unsupported_parameter", functions=[{}]
    ),
    chat("audio", "'audio' is not supported; leave it out.", "unsupported_parameter", audio={}),
    chat("tools", "Two tools have the same name.", tools=[TOOL, TOOL]),
    chat("tool_choice", "'tool_choice' names a function that is not among the 'tools'.", tool_choice="required"),
    chat(
        "tool_choice",
        "A forced tool call and another form of answer exclude each other.",
        tools=[TOOL],
        tool_choice="required",
        response_format={"type": "json_object"},
    ),
    chat(
        "tools",
        "The chat template of '<chat>' has no tool calls (those of Qwen2.5, Qwen3 and Llama 3.x have); leave "
        "'tools' out or deploy such a model.",
        "unsupported_parameter",
        tools=[TOOL],
    ),
    chat(
        "response_format",
        "The answer can't be held to this 'response_format': ….",
        "invalid_grammar",
        response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": {"not": {}}}},
    ),
    chat(
        "max_tokens",
        "This model's maximum context length is 8192 tokens. However, you requested … tokens (… in the "
        "prompt and 9000 for the completion). Please shorten the prompt or ask for fewer tokens.",
        "context_length_exceeded",
        max_tokens=9000,
    ),
    completion(
        "prompt",
        "This model's maximum context length is 8192 tokens. However, you requested 8192 tokens (8192 in "
        "the prompt). Please shorten the prompt or ask for fewer tokens.",
        "context_length_exceeded",
        prompt=[1] * 8192,
    ),
    completion("prompt", "The prompt is empty.", prompt=[]),
    completion(
        "temprature", "Unknown parameter: 'temprature'. Did you mean 'temperature'?", "unknown_parameter", temprature=1
    ),
    completion("prompt", "Token ids must be from 0 to 49151.", prompt=[-1]),
    completion("prompt", "Several prompts in one request are not supported; send one request each.", prompt=["a", "b"]),
    completion("logit_bias", "'logit_bias' names 'x', not a token id below 49152.", logit_bias={"x": 1}),
    completion(
        "best_of",
        "'best_of' other than 'n' is not supported: ask for 'n' answers with 'logprobs' and choose.",
        "unsupported_parameter",
        best_of=5,
    ),
    completion("echo", "'echo' is not supported; leave it out or send False.", "unsupported_parameter", echo=True),
    embedding("input", "Token ids must be from 0 to 30521.", input=[99_999]),
    embedding(
        "input",
        "This model's maximum context length is 256 tokens, but input 0 has 300 tokens.",
        "context_length_exceeded",
        input=[5] * 300,
    ),
    embedding(
        "dimensions",
        "This model's embeddings have 384 dimensions; other 'dimensions' are not supported.",
        "unsupported_parameter",
        dimensions=3,
    ),
    embedding("input", "Invalid value for 'input': String should have at least 1 character.", input=""),
    embedding(
        "input", "Invalid value for 'input': List should have at least 1 item after validation, not 0.", input=[]
    ),
    Case(
        "POST /v1/functions/<chat>", 400, None, "messages", "A language model needs 'messages' or 'prompt'.", {"a": 1}
    ),
]

RESPONSES = [
    response("input", "Invalid value for 'input': String should have at least 1 character.", input=""),
    response(
        "input.0",
        "Invalid value for 'input.0': an item of type 'function_call_output' needs 'call_id'.",
        input=[{"type": "function_call_output", "output": "x"}],
    ),
    response(
        "input.0.content.0.type",
        "Invalid value for 'input.0.content.0.type': content of type 'input_image' is not supported, only 'input_text' "
        "and 'output_text' are.",
        input=[{"role": "user", "content": [{"type": "input_image"}]}],
    ),
    response(
        "text.format",
        "Invalid value for 'text.format': type 'json_schema' needs a 'schema'.",
        text={"format": {"type": "json_schema", "name": "a"}},
    ),
    response(
        "text.format",
        "The answer can't be held to this 'response_format': ….",
        "invalid_grammar",
        text={"format": {"type": "json_schema", "name": "a", "schema": {"not": {}}}},
    ),
    response(
        "max_output_tokens",
        "This model's maximum context length is 8192 tokens. However, you requested … tokens (… in the prompt and 9000 "
        "for the completion). Please shorten the prompt or ask for fewer tokens.",
        "context_length_exceeded",
        max_output_tokens=9000,
    ),
    response(
        "background",
        "'background' is not supported; leave it out or send False.",
        "unsupported_parameter",
        background=True,
    ),
    response(
        "conversation", "'conversation' is not supported; leave it out.", "unsupported_parameter", conversation="c"
    ),
    response(
        "include",
        "'message.output_text.logprobs' is not supported together with 'tools'.",
        "unsupported_parameter",
        include=["message.output_text.logprobs"],
        tools=[{"type": "function", "name": "f"}],
    ),
    response(
        "tools.0.type",
        "Invalid value for 'tools.0.type': Input should be 'function'.",
        tools=[{"type": "web_search", "name": "f"}],
    ),
    Case(
        "POST /v1/responses",
        404,
        "previous_response_not_found",
        "previous_response_id",
        "Previous response with id 'resp_1' not found: it may no longer be kept.",
        {"model": "<chat>", "input": "a", "previous_response_id": "resp_1"},
    ),
    Case("GET /v1/responses/resp_1", 404, "response_not_found", "id", "There is no response 'resp_1'."),
]

BODIES = [
    Case(
        "POST /v1/completions",
        400,
        "invalid_json",
        None,
        "The request body is not valid JSON: ….",
        send={"content": b"{"},
    ),
    Case("POST /v1/completions", 400, None, None, "The request body must be a JSON object.", [1]),
    Case(
        "POST /v1/functions/<f>", 400, None, None, "The input holds an integer that doesn't fit into 64 bits.", 1 << 70
    ),
    Case(
        "POST /v1/functions/<f>",
        413,
        "request_too_large",
        None,
        "The request body is larger than the limit of 200000 bytes.",
        "x" * 200_000,
    ),
    Case(
        "POST /v1/functions/<f>",
        400,
        None,
        "Idempotency-Key",
        "The Idempotency-Key header is longer than 255 characters.",
        1,
        send={"headers": {"idempotency-key": "k" * 256}},
    ),
    Case(
        "PUT /v1/functions/<f>/jobs/a%20b",
        400,
        None,
        "id",
        "A job id of your own is 1 to 128 of letters, digits, '.', '_', '~' and '-'.",
        1,
    ),
    Case("GET /v1/functions/<f>/dead?limit=0", 400, None, "limit", "'limit' must be a number from 1 to 100."),
    Case("PATCH /v1/models", 405, "method_not_allowed", None, "The method PATCH is not allowed here; use GET or HEAD."),
    Case("GET /v1/files?after=x", 400, None, "after", "'after' is the id of the last one of the page before."),
    Case("POST /v1/files", 400, None, "file", "The form needs a 'file' (send it as multipart/form-data).", {}),
    Case(
        "POST /v1/files",
        400,
        None,
        "purpose",
        "'purpose' must be one of batch, user_data, assistants, fine-tune, vision, evals.",
        send={"data": {"purpose": "x"}, "files": {"file": b"x"}},
    ),
    Case(
        "POST /v1/files",
        400,
        "invalid_form",
        None,
        "The form can't be read: Missing boundary in multipart.",
        send={"content": b"x", "headers": {"content-type": "multipart/form-data"}},
    ),
]

UNKNOWN = [
    missing("GET /v1/apps/none/versions", "app_not_found", "name", "There is no app 'none' with versions."),
    missing("POST /v1/apps/none/rollback", "app_not_found", "name", "There is no app 'none' with versions."),
    missing("DELETE /v1/apps/none", "app_not_found", "name", "There is no app 'none' with functions."),
    missing("GET /v1/nothing", "not_found", None, "Unknown request URL: GET /v1/nothing."),
    missing(
        "POST /v1/chat/completions",
        "model_not_found",
        "model",
        "The model or function 'nothing' does not exist.",
        {"model": "nothing", "messages": HELLO},
    ),
    missing(
        "POST /v1/chat/completions",
        "model_not_found",
        "model",
        "'<embed>' is not a language model.",
        {"model": "<embed>", "messages": HELLO},
    ),
    missing("GET /v1/models/<chat>:sql", "model_not_found", "model", "The model '<chat>' has no adapter 'sql'."),
    missing(
        "POST /v1/embeddings",
        "model_not_found",
        "model",
        "'<chat>' is not an embedding model.",
        {"model": "<chat>", "input": "a"},
    ),
    missing("GET /v1/models/<f>", "model_not_found", "model", "'<f>' is not a model."),
    missing("DELETE /v1/functions/nothing", "model_not_found", None, "The model or function 'nothing' does not exist."),
    missing(
        "POST /v1/functions/nothing/start", "model_not_found", None, "The model or function 'nothing' does not exist."
    ),
    missing("GET /v1/functions/other.f", "model_not_found", None, "The model or function 'other.f' does not exist."),
    missing("DELETE /v1/functions/other.f", "model_not_found", None, "The model or function 'other.f' does not exist."),
    missing("GET /v1/jobs/nothing", "job_not_found", "id", "There is no job 'nothing'."),
    missing("GET /v1/functions/<f>/jobs/mine", "job_not_found", "id", "There is no job 'mine'."),
    missing(
        "GET /v1/jobs?function=nothing", "model_not_found", None, "The model or function 'nothing' does not exist."
    ),
    Case("GET /v1/jobs?state=bored", 400, None, "state", "'state' is one of queued, …."),
    Case("GET /v1/jobs?after=x", 400, None, "after", "'after' is the 'next' of the page before."),
    Case(
        "GET /v1/jobs?tenant=other",
        400,
        None,
        "tenant",
        "Only the operator may list another tenant's jobs.",
        as_="invoke",
    ),
    webhook("invalid_webhook_url", "Webhook-URL: a webhook's port is 80, 443, or …, not 22.", "https://a:22"),
    webhook(
        "invalid_webhook_url",
        "Webhook-URL: '10.0.0.1' is not a public address (see STOKER_WEBHOOK_ALLOW).",
        "https://10.0.0.1",
    ),
    webhook(
        "webhooks_unavailable",
        "Webhooks can't be signed here: this gateway was started without the deployment's STOKER_SECRET.",
        "https://example.com",
    ),
    Case(
        "POST /v1/webhooks/secret/rotate",
        400,
        None,
        "overlap_s",
        "The body may have 'overlap_s', a number of seconds from 0 to 2592000.",
        {"overlap_s": -1},
    ),
    missing("GET /v1/batches/batch_1", "batch_not_found", "id", "There is no batch 'batch_1'."),
    missing("GET /v1/files/file-1", "file_not_found", "id", "There is no file 'file-1'."),
    missing("GET /v1/tenants/nobody", "tenant_not_found", "name", "There is no tenant 'nobody'."),
    missing("DELETE /v1/tenants/acme/keys/k", "key_not_found", "key", "Tenant 'acme' has no key 'k'.", as_="admin"),
    missing("DELETE /v1/prices/nothing", "price_not_found", "function", "There is no price for 'nothing'."),
    missing(
        "GET /v1/jobs/<f>-00000000001111111111111111",
        "job_not_found",
        "id",
        "There is no job '<f>-00000000001111111111111111'.",
    ),
]


def router(message: str, target: str) -> Case:
    settings = {"routes": [{"target": target, "tools": True}], "default": target}
    return deployment("spec.router", message, "invalid_spec", kind="router", code="", entry="", router=settings)


DEPLOYMENTS = [
    router("Router 'new' names 'nowhere', which is not deployed; deploy it first, or with it.", "nowhere"),
    router("Router 'new' names '<chat>:ada', but model '<chat>' has no adapter 'ada'.", "<chat>:ada"),
    router("Router 'new' names '<chat>:', but model '<chat>' has no adapter ''.", "<chat>:"),
    router("Router 'new' needs a language model where it names '<f>'.", "<f>"),
    Case("PUT /v1/apps/a", 400, None, "functions", "'functions' must be a list of at least one function's spec.", {}),
    Case(
        "PUT /v1/apps/a",
        400,
        None,
        "functions",
        "Two functions of the app have the same name.",
        {"functions": [{"name": "b", "kind": "python", "code": NONE64, "entry": "m:f"}] * 2},
    ),
    Case(
        "PUT /v1/apps/a",
        409,
        "function_exists",
        "functions",
        "Function '<f>' belongs to app '': choose another name, or delete it there first.",
        {"functions": [{"name": "<f>", "kind": "python", "code": NONE64, "entry": "m:f"}]},
    ),
    Case(
        "PUT /v1/bundles/x", 400, None, "sha256", "A bundle is named by its SHA-256: 64 lower-case hexadecimal digits."
    ),
    Case(
        f"PUT /v1/bundles/{NONE64}",
        400,
        "digest_mismatch",
        "sha256",
        f"The body's SHA-256 is {EMPTY_SHA}, not the {NONE64} of the URL.",
    ),
    Case(f"PUT /v1/bundles/{EMPTY_SHA}", 400, "invalid_bundle", None, "The bundle is not a zip file."),
    Case("PUT /v1/functions/new", 400, None, "spec", "The body must be an object with the function's 'spec'.", {}),
    deployment("spec.name", "The spec is named 'old', the URL 'new'.", name="old"),
    deployment("spec.entry", "'entry' must be 'module:attribute'.", "invalid_spec", entry="x"),
    deployment("spec.code", "'code' must be the SHA-256 of a bundle.", "invalid_spec", code="x"),
    deployment(
        "spec.code",
        f"There is no bundles/{NONE64}.zip in the store: send it with PUT /v1/bundles/{NONE64} first.",
        "ObjectMissing",
    ),
    deployment(
        "spec.scaling",
        "Invalid value for 'spec.scaling': max_replicas (0) must be at least 1 and at least min_replicas (0).",
        scaling={"max_replicas": 0},
    ),
    Case("PUT /v1/functions/New", 400, "invalid_spec", "spec", "….", {"spec": {"kind": "python"}}),
    deployment("spec.weights", "The weights can't be used: ….", "ObjectMissing", kind="llm", weights="file:///nothing"),
    deployment("spec.weights", "….", "invalid_spec", kind="llm", weights="gopher://x"),
]

BATCHES = [
    batch(
        400,
        None,
        "endpoint",
        "'endpoint' must be one of /v1/chat/completions, /v1/completions, /v1/embeddings.",
        endpoint="/v1/files",
    ),
    batch(400, None, "completion_window", "'completion_window' must be '24h'.", completion_window="1h"),
    batch(400, None, "input_file_id", "'input_file_id' must be the id of an uploaded file.", input_file_id="x"),
    batch(404, "file_not_found", "input_file_id", "There is no file 'file-1'."),
    batch(
        400,
        None,
        "input_file_id",
        "The input file must have been uploaded with purpose 'batch'.",
        input_file_id="<evals file>",
    ),
    batch(
        400,
        None,
        "metadata",
        "'metadata' is at most 16 strings of up to 512 characters.",
        input_file_id="<batch file>",
        metadata={"a": 1},
    ),
]

TENANTS = [
    Case(
        "GET /v1/models",
        401,
        "invalid_api_key",
        None,
        "This service needs an API key: send it as 'Authorization: Bearer sk-stoker-…'.",
        type="authentication_error",
        as_="nobody",
    ),
    Case(
        "GET /v1/models",
        401,
        "invalid_api_key",
        None,
        "The API key is not one of this service.",
        type="authentication_error",
        as_="stranger",
        send={"headers": {"authorization": "Bearer x"}},
    ),
    Case(
        "GET /v1/models",
        401,
        "invalid_api_key",
        None,
        "The API key is wrong, has expired or was revoked.",
        type="authentication_error",
        as_="stranger",
    ),
    Case(
        "GET /v1/tenants",
        403,
        "insufficient_scope",
        None,
        "This API key lacks the scope 'admin', which this route needs.",
        type="permission_error",
        as_="invoke",
    ),
    Case(
        "GET /v1/usage?tenant=*",
        403,
        "insufficient_scope",
        None,
        "Only a key with scope admin sees other tenants' usage.",
        type="permission_error",
        as_="invoke",
    ),
    tenant("name", "'default' is the operator, who has no limits.", None, {}, "PUT /v1/tenants/default"),
    tenant(
        "name",
        "tenant name 'A' must be 1 to 32 of a-z, 0-9, '_' and '-', from a letter on.",
        "invalid_tenant",
        {},
        "PUT /v1/tenants/A",
    ),
    tenant("a", "Unknown field 'a'; a tenant has 'weight' and 'limits'.", None, {"a": 1}),
    tenant("limits", "'limits' must be an object.", None, {"limits": 1}),
    tenant("limits", "unknown limit(s): a.", "invalid_tenant", {"limits": {"a": 1}}),
    Case(
        "PUT /v1/tenants/acme",
        412,
        "tenant_exists",
        "name",
        "There is a tenant 'acme' already.",
        {},
        as_="admin",
        send={"headers": {"if-none-match": "*"}},
    ),
    tenant(
        "scopes",
        "'scopes' must be a list of invoke, deploy, admin.",
        None,
        {"scopes": ["x"]},
        "POST /v1/tenants/acme/keys",
    ),
    tenant(
        "expires_in_s",
        "'expires_in_s' must be a number of seconds from 0 to 316224000.",
        None,
        {"expires_in_s": -1},
        "POST /v1/tenants/acme/keys",
    ),
    tenant("from", "'from' must be a day like 2026-01-31.", None, None, "GET /v1/usage?from=x"),
    tenant("from", "'from' and 'to' must be days of the calendar.", None, None, "GET /v1/usage?from=2026-02-31"),
    tenant("to", "'from' to 'to' must be 1 to 366 days.", None, None, "GET /v1/usage?from=2020-01-01&to=2026-01-01"),
    Case("PUT /v1/prices/*", 400, "invalid_price", None, "unknown price(s): a.", {"a": 1}),
]

LOGS = [
    Case(
        "GET /v1/functions/<f>/logs?since=x",
        400,
        None,
        "since",
        "'since' is how long ago, like 30s, 10m, 2h or 1d, or unix seconds.",
    ),
    Case("GET /v1/functions/<f>/logs?follow=x", 400, None, "follow", "'follow' is true or false."),
    Case(
        "GET /v1/functions/<f>/logs?follow=true",
        400,
        None,
        "Last-Event-ID",
        "Last-Event-ID is not an id of this log.",
        send={"headers": {"last-event-id": "x"}},
    ),
]

MSGPACK = {"content-type": "application/msgpack"}


def packed(message: str, content: bytes) -> Case:
    send = {"content": content, "headers": MSGPACK}
    return Case("POST /v1/functions/<f>", 400, "invalid_msgpack", None, message, send=send)


def secret(param: str, message: str, name: str, value: Any) -> Case:
    return Case(f"PUT /v1/secrets/{name}", 400, "invalid_secret", param, message, {"value": value})


FUNCTIONS = [
    packed("The request body is not valid msgpack: ….", b"\xc1"),
    packed("The input is nested deeper than 100 levels.", b"\x91" * 200 + b"\x01"),
    packed("Keys of maps must be text.", b"\x81\xc4\x01a\x01"),
    packed("Of msgpack's extension types only arrays (78) are taken; send times as text.", b"\xd4\x05a"),
    packed("an array's data begins with [dtype, shape].", b"\xd4\x4ea"),
    Case("POST /v1/functions/<f>", 422, "invalid_input", "$bytes", "'$bytes' must be base64 text.", {"$bytes": "?"}),
    deployment(
        "spec", "input_schema is no JSON Schema (2020-12): ….", "invalid_spec", input_schema={"type": "nonsense"}
    ),
    deployment(
        "spec.secrets",
        "There is no secret 'hf-token': store it first, with `stoker secrets set hf-token`.",
        "secret_not_found",
        secrets=["hf-token"],
    ),
    missing("DELETE /v1/secrets/hf-token", "secret_not_found", "name", "There is no secret 'hf-token'."),
    secret("name", "secret name 'Upper' must be ….", "Upper", "x"),
    secret("value", "'value' must be text, without NUL characters.", "a", 3),
    secret("value", "A secret has up to 32 KiB.", "a", "x" * 40_000),
    Case(
        "PUT /v1/secrets/a",
        409,
        "no_deployment_secret",
        None,
        "This gateway has no secret to encrypt with: start it with STOKER_SECRET, at least 16 random characters.",
        {"value": "x"},
    ),
]

CASES = [*SCHEMAS, *RESPONSES, *BODIES, *UNKNOWN, *DEPLOYMENTS, *BATCHES, *TENANTS, *LOGS, *FUNCTIONS]
