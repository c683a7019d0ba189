"""What users write: an App with functions and models in it."""

import functools
import inspect
import re
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Generic, Literal, ParamSpec, TypeVar

from typing_extensions import TypedDict, Unpack

from stoker.runtime.client.remote import default_client, input_of
from stoker.runtime.routing.router import Route, Router
from stoker.runtime.spec import (
    MAX_SECONDS,
    SLO,
    Batch,
    FunctionSpec,
    Limits,
    ModelOptions,
    Scaling,
    check_name,
    require,
)

if TYPE_CHECKING:
    from stoker.runtime.client.job import Job

P = ParamSpec("P")
R = TypeVar("R")

M = TypeVar("M", bound=Callable[..., Any])

MARK, LOAD, METHOD = "__stoker__", "load", "method"
WORD_START = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")

__all__ = ["SLO", "App", "Batch", "Function", "load", "method"]


class Options(TypedDict, total=False):
    """Times are in seconds. `gpu` keeps the function off hosts without one; `concurrency` calls (or batches) run at
    once in a replica; `buffer_replicas` are kept to spare while there is work. `env` are environment variables;
    `secrets` name values that were stored with `stoker secrets set`: "hf-token" becomes the variable HF_TOKEN.
    `memory_mb` bounds what a replica may allocate (0: no bound). The URL `webhook` is told how each job ended.
    `limits`: deadlines, and what the function, or each tenant in it, may have at once and per minute."""

    name: str
    gpu: str
    batch: Batch | None
    concurrency: int
    min_replicas: int
    max_replicas: int
    idle_timeout: float
    buffer_replicas: int
    timeout: float
    retries: int
    limits: Limits | None
    slo: SLO | None
    env: Mapping[str, str]
    secrets: Sequence[str]
    memory_mb: int
    webhook: str


class Function(Generic[P, R]):
    """A deployed-to-be Python function. Calling it runs it here, which is how it is unit-tested; `remote`, `spawn` and
    `map` run the deployed one. With `batch` they take single inputs, and give single results."""

    def __init__(self, body: Callable[P, R], spec: FunctionSpec) -> None:
        self.body = body
        self.spec = spec
        functools.update_wrapper(self, body)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.body(*args, **kwargs)

    def remote(self, *args: Any, **kwargs: Any) -> Any:
        """Runs it and waits for its result."""
        return default_client().invoke(self.spec.name, input_of(self.body, args, kwargs))

    def spawn(self, *args: Any, **kwargs: Any) -> "Job":
        """Queues a job."""
        return default_client().spawn(self.spec.name, input_of(self.body, args, kwargs))

    def map(self, inputs: Iterable[Any], **options: Any) -> Iterator[Any]:
        """The results for many inputs; options as of Client.map."""
        return default_client().map(self.spec.name, inputs, **options)


class App:
    """A named group of functions that is deployed from one file."""

    def __init__(self, name: str, *, include: tuple[str, ...] = ()) -> None:
        """`include` names further files or folders, relative to the app's file, that its code needs."""
        check_name(name, "app")
        require(not isinstance(include, str), f"include must be a tuple of paths: include=({include!r},)")
        self.name = name
        self.include = include
        self.functions: dict[str, FunctionSpec] = {}
        self.bodies: dict[str, Callable[..., Any]] = {}

    def function(self, *misplaced: object, **options: Unpack[Options]) -> Callable[[Callable[P, R]], Function[P, R]]:
        """A Python function, `async def` and generators included.

        Annotated parameters are checked before a worker wakes, and get values of their type: builtins, pydantic models,
        dataclasses, TypedDicts, numpy arrays. An only parameter gets the whole input, several get an object's fields.

        With `batch`, it takes a list of inputs and returns a list as long. An exception in the place of a result fails
        that input alone; one that is raised fails all inputs of the batch, each with the same error.
        """
        require(not misplaced, "write @app.function() with parentheses; its options are keywords")

        def declare(body: Callable[P, R]) -> Function[P, R]:
            require(hasattr(body, "__qualname__"), f"@app.function() goes above a def, which {body!r} is not")
            name = options.get("name") or own_name(body.__name__)
            return Function(body, self._add_python(name, f"{body.__module__}:{body.__qualname__}", body, options))

        return declare

    def cls(self, *misplaced: object, **options: Unpack[Options]) -> Callable[[type[R]], type[R]]:
        """A class whose methods marked with `@stoker.method` are functions, with the options of `App.function`.

        A replica makes one instance, without arguments, and runs the method marked with `@stoker.load`, if there is
        one, before it takes work: what fails there is reported as a version that can't start. The function is called
        like the class in lower case, "-" between its words; with several methods each is a function of its own, named
        CLASS-METHOD, with replicas of its own. Locally the class stays as it is: make an instance, call its methods.
        """
        require(not misplaced, "write @app.cls() with parentheses; its options are keywords")

        def declare(kind: type[R]) -> type[R]:
            methods = marked(kind, METHOD)
            require(bool(methods), f"class {kind.__name__!r} has no method marked with @stoker.method")
            require(len(marked(kind, LOAD)) <= 1, f"class {kind.__name__!r} has more than one @stoker.load")
            base = options.get("name") or class_name(kind.__name__)
            for method in methods:
                name = base if len(methods) == 1 else f"{base}-{method}"
                self._add_python(name, f"{kind.__module__}:{kind.__qualname__}.{method}", bound(kind, method), options)
            return kind

        return declare

    def llm(
        self,
        name: str,
        *,
        weights: str,
        dtype: str = "auto",
        max_model_len: int = 0,
        max_seqs: int = 64,
        public_prefix: str = "",
        adapters: Mapping[str, str] | None = None,
        adapter_slots: int = 8,
        adapter_rank: int = 16,
        batch_invariant: bool = False,
        min_replicas: int = 0,
        max_replicas: int = 1,
        idle_timeout: float = 60.0,
        buffer_replicas: int = 0,
        timeout: float = 600.0,
        limits: Limits | None = None,
        slo: SLO | None = None,
    ) -> FunctionSpec:
        """A language model published with `stoker push`; `weights` is its store URL; `buffer_replicas` are kept to
        spare while there is work. `public_prefix`: a system prompt whose computation all tenants may share. `adapters`:
        LoRA adapters by name, also published with `stoker push`, of at most `adapter_rank`, `adapter_slots` of them on
        a device at once; callers ask for "NAME:ADAPTER". `batch_invariant`: slower; no bit depends on other calls."""
        more = {"adapter_slots": adapter_slots, "adapter_rank": adapter_rank, "batch_invariant": batch_invariant}
        return self._add(
            FunctionSpec(
                name=name,
                kind="llm",
                app=self.name,
                weights=weights,
                model=ModelOptions(dtype, max_model_len, max_seqs, **more),  # type: ignore[arg-type]
                slo=slo or SLO(),
                scaling=scaling_of(min_replicas, max_replicas, idle_timeout, buffer_replicas),
                limits=limits_of(limits, timeout),
                public_prefix=public_prefix,
                adapters=dict(adapters or {}),
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
        limits: Limits | None = None,
    ) -> FunctionSpec:
        """A text encoder published with `stoker push`, served under /v1/embeddings."""
        return self._add(
            FunctionSpec(
                name=name,
                kind="embed",
                app=self.name,
                weights=weights,
                model=ModelOptions(dtype=dtype),
                scaling=scaling_of(min_replicas, max_replicas, idle_timeout),
                limits=limits_of(limits, timeout),
            )
        )

    def router(
        self,
        name: str,
        *,
        routes: Sequence[Route],
        default: str,
        embed: str = "",
        min_score: float = 0.5,
        classify_within_ms: float = 500.0,
        fallbacks: Mapping[str, str] | None = None,
        max_queued: int = 0,
        prefer_awake: bool = False,
    ) -> FunctionSpec:
        """A model name under which each request goes to one of several language models; see Router for how."""
        router = Router(
            routes=tuple(routes),
            default=default,
            embed=embed,
            min_score=min_score,
            classify_within_ms=classify_within_ms,
            fallbacks=dict(fallbacks or {}),
            max_queued=max_queued,
            prefer_awake=prefer_awake,
        )
        return self._add(FunctionSpec(name=name, kind="router", app=self.name, router=router))

    def _add_python(self, name: str, entry: str, body: Callable[..., Any], options: Options) -> FunctionSpec:
        unknown = sorted(set(options) - set(Options.__annotations__))
        require(not unknown, f"there is no option {', '.join(unknown)}; there are {', '.join(Options.__annotations__)}")
        spec = self._add(python_spec(app=self.name, entry=entry, **{**options, "name": name}))
        self.bodies[spec.name] = body
        return spec

    def _add(self, spec: FunctionSpec) -> FunctionSpec:
        check_name(spec.name)
        require(spec.name not in self.functions, f"app {self.name!r} declares {spec.name!r} twice")
        self.functions[spec.name] = spec
        return spec


def load(method: M) -> M:
    """Marks the method of an `App.cls` class that runs once per replica, before its first call."""
    setattr(getattr(method, "__func__", method), MARK, LOAD)
    return method


def method(method: M) -> M:
    """Marks a method of an `App.cls` class as a function."""
    setattr(getattr(method, "__func__", method), MARK, METHOD)
    return method


def marked(kind: type, mark: str) -> list[str]:
    """Names of the methods with this mark, inherited ones too, in the order of their definition."""
    names = dict.fromkeys(name for each in reversed(kind.__mro__) for name in vars(each))
    return [name for name in names if getattr(getattr(kind, name), MARK, "") == mark]


def bound(kind: type, method: str) -> Callable[..., Any]:
    """As an instance has it: with the parameters that a caller gives."""
    found = getattr(kind, method)
    is_plain = not isinstance(inspect.getattr_static(kind, method), staticmethod | classmethod)
    return types.MethodType(found, kind) if is_plain else found


def own_name(name: str) -> str:
    """Raises InvalidSpec for a Python name that no deployed function can have."""
    require(name != "<lambda>", "a lambda can't be deployed: write it as a def at the top level of the file")
    require(
        name.isascii(),
        f"no function can be deployed as {name!r}: give it @app.function(name='…') of a-z, 0-9, '_' and '-'",
    )
    return name


def class_name(name: str) -> str:
    """ "ImageTagger" as "image-tagger"."""
    return WORD_START.sub("-", name).lower()


def python_spec(
    *,
    app: str,
    entry: str,
    name: str,
    gpu: str = "",
    batch: Batch | None = None,
    concurrency: int = 1,
    min_replicas: int = 0,
    max_replicas: int = 1,
    idle_timeout: float = 60.0,
    buffer_replicas: int = 0,
    timeout: float = 600.0,
    retries: int = 2,
    limits: Limits | None = None,
    slo: SLO | None = None,
    env: Mapping[str, str] | None = None,
    secrets: Sequence[str] = (),
    memory_mb: int = 0,
    webhook: str = "",
) -> FunctionSpec:
    require(not isinstance(secrets, str), f"secrets must be a list of names: secrets=[{secrets!r}]")
    return FunctionSpec(
        name=name,
        kind="python",
        app=app,
        entry=entry,
        gpu=gpu,
        batch=batch,
        concurrency=concurrency,
        slo=slo or SLO(),
        scaling=scaling_of(min_replicas, max_replicas, idle_timeout, buffer_replicas),
        limits=limits_of(limits, timeout, retries),
        env=dict(env or {}),
        secrets=tuple(secrets),
        memory_mb=memory_mb,
        webhook=webhook,
    )


def limits_of(limits: Limits | None, timeout: float, retries: int = 2) -> Limits:
    """Raises InvalidSpec, in the words of who wrote the app; so does `scaling_of`."""
    require(0 <= timeout <= MAX_SECONDS, f"timeout must be 0 to {MAX_SECONDS:g} seconds (0: no limit), not {timeout}")
    require(0 <= retries < 100, f"retries must be 0 to 99, not {retries}")
    usual = Limits()
    given = limits or usual
    for option, field in (("timeout", "run_within_s"), ("retries", "max_attempts")):
        unsaid = getattr(given, field) == getattr(usual, field)
        require(unsaid, f"say {option}=... beside limits, not {field} in them")
    return replace(given, run_within_s=timeout, max_attempts=retries + 1)


def scaling_of(min_replicas: int, max_replicas: int, idle_timeout: float, buffer_replicas: int = 0) -> Scaling:
    require(0 <= idle_timeout <= MAX_SECONDS, f"idle_timeout must be 0 to {MAX_SECONDS:g} seconds, not {idle_timeout}")
    return Scaling(min_replicas, max_replicas, idle_timeout, buffer_replicas)
