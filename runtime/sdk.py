"""What users write: an App with functions and models in it, and a client that calls deployed ones."""

import contextlib
import functools
import inspect
import json
import os
import time
from collections.abc import Callable, Iterator
from typing import Any, Generic, Literal, ParamSpec, TypeVar

import httpx

from stoker.runtime.spec import SLO, Batch, FunctionSpec, Limits, ModelOptions, Scaling, check_name, require

P = ParamSpec("P")
R = TypeVar("R")

DEFAULT_URL = "http://127.0.0.1:8000"
LONGEST_PAUSE_S = 1.0
SCALARS: dict[str, tuple[type, ...]] = {"int": (int, float), "float": (int, float), "str": (str,), "bool": (bool,)}

__all__ = ["SLO", "App", "Batch", "Client", "Function", "StokerError", "Unreachable"]


class Function(Generic[P, R]):
    """A deployed-to-be Python function. Calling it runs it here, which is how it is unit-tested."""

    def __init__(self, body: Callable[P, R], spec: FunctionSpec) -> None:
        self.body = body
        self.spec = spec
        functools.update_wrapper(self, body)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.body(*args, **kwargs)


class App:
    """A named group of functions that is deployed from one file."""

    def __init__(self, name: str, *, include: tuple[str, ...] = ()) -> None:
        """`include` names further files or folders, relative to the app's file, that its code needs."""
        check_name(name)
        require(not isinstance(include, str), f"include must be a tuple of paths: include=({include!r},)")
        self.name = name
        self.include = include
        self.functions: dict[str, FunctionSpec] = {}

    def function(
        self,
        *misplaced: object,
        name: str = "",
        gpu: str = "",
        batch: Batch | None = None,
        concurrency: int = 1,
        min_replicas: int = 0,
        max_replicas: int = 1,
        idle_timeout: float = 60.0,
        buffer_replicas: int = 0,
        timeout: float = 600.0,
        retries: int = 2,
        slo: SLO | None = None,
    ) -> Callable[[Callable[P, R]], Function[P, R]]:
        """With `batch`, the function takes a list of inputs and returns a list as long. Times are in seconds; `gpu`
        keeps it off hosts without one. `buffer_replicas` are kept to spare while there is work."""
        require(not misplaced, "write @app.function() with parentheses; its options are keywords")

        def declare(body: Callable[P, R]) -> Function[P, R]:
            spec = FunctionSpec(
                name=name or body.__name__,
                kind="python",
                app=self.name,
                entry=f"{body.__module__}:{body.__qualname__}",
                gpu=gpu,
                batch=batch,
                concurrency=concurrency,
                slo=slo or SLO(),
                scaling=Scaling(min_replicas, max_replicas, idle_timeout, buffer_replicas),
                limits=Limits(run_within_s=timeout, max_attempts=retries + 1),
            )
            return Function(body, self._add(spec))

        return declare

    def llm(
        self,
        name: str,
        *,
        weights: str,
        dtype: str = "auto",
        max_model_len: int = 0,
        max_seqs: int = 64,
        min_replicas: int = 0,
        max_replicas: int = 1,
        idle_timeout: float = 60.0,
        buffer_replicas: int = 0,
        timeout: float = 600.0,
        slo: SLO | None = None,
    ) -> FunctionSpec:
        """A language model published with `stoker push`; `weights` is its store URL; `buffer_replicas` are kept to
        spare while there is work."""
        options = ModelOptions(dtype=dtype, max_model_len=max_model_len, max_seqs=max_seqs)  # type: ignore[arg-type]
        return self._add(
            FunctionSpec(
                name=name,
                kind="llm",
                app=self.name,
                weights=weights,
                model=options,
                slo=slo or SLO(),
                scaling=Scaling(min_replicas, max_replicas, idle_timeout, buffer_replicas),
                limits=Limits(run_within_s=timeout),
            )
        )

    def embed(
        self,
        name: str,
        *,
        weights: str,
        dtype: Literal["auto", "float32", "bfloat16"] = "auto",
        min_replicas: int = 0,
        max_replicas: int = 1,
        idle_timeout: float = 60.0,
        timeout: float = 600.0,
    ) -> FunctionSpec:
        """A text encoder published with `stoker push`, served under /v1/embeddings."""
        return self._add(
            FunctionSpec(
                name=name,
                kind="embed",
                app=self.name,
                weights=weights,
                model=ModelOptions(dtype=dtype),
                scaling=Scaling(min_replicas, max_replicas, idle_timeout),
                limits=Limits(run_within_s=timeout),
            )
        )

    def _add(self, spec: FunctionSpec) -> FunctionSpec:
        check_name(spec.name)
        require(spec.name not in self.functions, f"app {self.name!r} declares {spec.name!r} twice")
        self.functions[spec.name] = spec
        return spec


class InvalidInput(TypeError):
    """An input can't be sent, or doesn't fit the function's parameters."""


def call(body: Callable[..., Any], value: Any) -> Any:
    """Runs a function on one input: its only parameter gets the whole input, several take the fields of an object.

    Raises InvalidInput, before the function runs, when that doesn't fit.
    """
    signature = inspect.signature(body)
    if len(signature.parameters) == 1:
        check_only(next(iter(signature.parameters.values())), value)
        return body(value)
    fields = {} if value is None else value
    if not isinstance(fields, dict):
        raise InvalidInput(f"{takes(signature)}, not {type(value).__name__}")
    try:
        bound = signature.bind(**fields)
    except TypeError as error:
        raise InvalidInput(f"{takes(signature)}: {error}") from None
    return body(*bound.args, **bound.kwargs)


def check_only(parameter: inspect.Parameter, value: Any) -> None:
    """A parameter that is annotated as a number, text or bool gets no other value; any number is a number."""
    annotation = parameter.annotation
    kind = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", "")
    fits = SCALARS.get(kind)
    defaulted = value is None and parameter.default is not parameter.empty
    if fits is None or defaulted or parameter.kind is parameter.VAR_POSITIONAL or isinstance(value, fits):
        return
    name = parameter.name
    field = value.get(name) if isinstance(value, dict) and len(value) == 1 else None
    fitting = isinstance(field, fits)
    advice = f"send {json.dumps(field)}, not {json.dumps(value)}" if fitting else f"not {type(value).__name__}"
    raise InvalidInput(f"this function's only parameter '{name}' ({kind}) gets the whole body: {advice}")


def takes(signature: inspect.Signature) -> str:
    names = [name if p.default is p.empty else f"{name} (optional)" for name, p in signature.parameters.items()]
    return (
        f"this function takes an object with the fields {', '.join(names)}" if names else "this function takes no input"
    )


class StokerError(Exception):
    """The gateway's answer to a request that failed: `status`, OpenAI's `type`, `code` and `param`, and the job if
    there was one (its record has the traceback of the function's own code)."""

    def __init__(self, status: int, error: dict[str, Any], job_id: str = "") -> None:
        super().__init__(error.get("message", f"HTTP {status}"))
        self.job_id = job_id
        self.status = status
        self.type = error.get("type")
        self.code = error.get("code")
        self.param = error.get("param")


class Unreachable(StokerError):
    """No gateway answers at the client's address; `status` is 0."""

    def __init__(self, url: str, why: Exception) -> None:
        super().__init__(0, {"message": f"no gateway answers at {url} ({why or type(why).__name__})"})


class Client:
    """Talks to a gateway over HTTP. `url` and `api_key` default to STOKER_URL and STOKER_API_KEY."""

    def __init__(self, url: str = "", api_key: str = "", timeout: float = 600.0) -> None:
        base = url or os.environ.get("STOKER_URL", DEFAULT_URL)
        key = api_key or os.environ.get("STOKER_API_KEY", "")
        headers = {"authorization": f"Bearer {key}"} if key else {}
        self.url = base
        self._http = httpx.Client(base_url=base, headers=headers, timeout=timeout)

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    def request(self, method: str, path: str, **options: Any) -> Any:
        """The decoded JSON body. Raises StokerError for an error answer, and Unreachable when there is none."""
        with self._reaching():
            return decoded(self._http.request(method, path, **options))

    def invoke(self, function: str, value: Any = None, *, idempotency_key: str = "") -> Any:
        """Runs `function` and waits for its result."""
        return self.request("POST", f"/v1/functions/{function}", **body_of(value, idempotency_key))

    def submit(self, function: str, value: Any = None, *, idempotency_key: str = "") -> dict[str, Any]:
        """Queues a job and returns its record at once."""
        return self.request("POST", f"/v1/functions/{function}/jobs", **body_of(value, idempotency_key))

    def stream(self, function: str, value: Any = None) -> Iterator[Any]:
        """The parts that a generator yields, as they come. When its worker is lost, they begin again with the first."""
        options = body_of(value)
        options["headers"]["accept"] = "text/event-stream"
        name = ""
        for line in self.stream_lines("POST", f"/v1/functions/{function}", **options):
            field, _, text = line.partition(": ")
            if field == "data" and not name:
                yield json.loads(text)
            elif field == "data" and name == "error":
                raise StokerError(500, json.loads(text)["error"])
            name = text if field == "event" else name if line else ""

    def job(self, job_id: str) -> dict[str, Any]:
        return self.request("GET", f"/v1/jobs/{job_id}")

    def wait(self, job_id: str, timeout: float = 600.0) -> dict[str, Any]:
        """The job's record once it has ended, however it did. Raises TimeoutError after `timeout` seconds."""
        deadline, pause = time.monotonic() + timeout, 0.05
        while (record := self.job(job_id))["finished_at"] is None:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError(f"job {job_id} is still {record['state']} after {timeout:g} s")
            time.sleep(min(pause, left))
            pause = min(2 * pause, LONGEST_PAUSE_S)
        return record

    def cancel(self, job_id: str) -> dict[str, Any]:
        return self.request("DELETE", f"/v1/jobs/{job_id}")

    def dead(self, function: str, *, limit: int = 20, after: str = "") -> dict[str, Any]:
        """A page of the function's jobs whose attempts are used up, the newest first."""
        return self.request("GET", f"/v1/functions/{function}/dead", params={"limit": limit, "after": after})

    def replay(self, job_id: str) -> dict[str, Any]:
        """Queues a dead or failed job again and returns its record."""
        return self.request("POST", f"/v1/jobs/{job_id}/replay")

    def delete(self, function: str) -> None:
        self.request("DELETE", f"/v1/functions/{function}")

    def functions(self) -> list[dict[str, Any]]:
        return self.request("GET", "/v1/functions")["data"]

    def hosts(self) -> dict[str, Any]:
        """Pools and hosts, and what functions wait for."""
        return self.request("GET", "/v1/hosts")

    def stream_lines(self, method: str, path: str, **options: Any) -> Iterator[str]:
        """The lines of a streamed answer, keep-alive comments included."""
        with self._reaching(), self._http.stream(method, path, **options) as response:
            if response.is_error:
                response.read()
            raise_for_error(response)
            yield from response.iter_lines()

    @contextlib.contextmanager
    def _reaching(self) -> Iterator[None]:
        try:
            yield
        except httpx.TransportError as error:
            raise Unreachable(self.url, error) from error


def body_of(value: Any, key: str = "") -> dict[str, Any]:
    """Raises InvalidInput for what JSON can't hold."""
    try:
        content = json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
    except (TypeError, ValueError) as error:
        raise InvalidInput(
            f"an input is JSON: None, bool, finite numbers, str, and lists and dicts of them ({error}); "
            "encode bytes with base64"
        ) from None
    headers = {"content-type": "application/json"} | ({"idempotency-key": key} if key else {})
    return {"content": content, "headers": headers}


def decoded(response: httpx.Response) -> Any:
    raise_for_error(response)
    return response.json() if response.content else None


def raise_for_error(response: httpx.Response) -> None:
    if response.is_error:
        try:
            error = response.json()["error"]
        except (ValueError, KeyError, TypeError):
            error = {"message": f"HTTP {response.status_code}: {response.text[:200]}"}
        raise StokerError(response.status_code, error, response.headers.get("x-job-id", ""))
