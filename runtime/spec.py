"""What a deployed function is: the record that SDK, gateway, controller and host agent share."""

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import lru_cache
from typing import Any, Literal, get_args

from stoker.runtime.requirement import InvalidSpec, reject_unknown, require
from stoker.runtime.routing.router import Router
from stoker.runtime.webhooks.target import InvalidTarget, target_of

Kind = Literal["llm", "embed", "python", "router"]

NAME = re.compile(r"[a-z][a-z0-9_]*(-[a-z0-9_]+)*")
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
VERSION = re.compile(r"[A-Za-z0-9._+-]{0,64}")
KINDS = get_args(Kind)
MAX_SECONDS = 1e9
LEAST_RETENTION_S = 10.0
MAX_ADAPTERS = 1000
MAX_RANK = 64

log = logging.getLogger("stoker.spec")


@dataclass(frozen=True, slots=True)
class Batch:
    """Dynamic batching: the function gets a list of up to `max_size` inputs that arrived within `max_wait_ms`."""

    max_size: int = 32
    max_wait_ms: float = 5.0

    def __post_init__(self) -> None:
        require(1 <= self.max_size <= 4096, f"batch max_size must be 1 to 4096, not {self.max_size}")
        require(0 <= self.max_wait_ms <= 600_000, f"batch max_wait_ms must be 0 to 600000, not {self.max_wait_ms}")


@dataclass(frozen=True, slots=True)
class SLO:
    """Latency goal in milliseconds: time to first token, or to the start of a Python function's call."""

    ttft_ms: float | None = None

    def __post_init__(self) -> None:
        ttft_ms = self.ttft_ms
        require(
            ttft_ms is None or 1 <= ttft_ms <= MAX_SECONDS * 1000,
            f"ttft_ms must be 1 to {MAX_SECONDS * 1000:g} milliseconds (leave it out for no goal), not {ttft_ms}",
        )


@dataclass(frozen=True, slots=True)
class Scaling:
    """Replica bounds; `idle_timeout_s` without work takes a replica away, down to `min_replicas`. Another replica is
    added for every `target_queue` jobs queued or running (0: for as many as one replica runs at once). While there is
    work, `buffer_replicas` more than it needs are kept."""

    min_replicas: int = 0
    max_replicas: int = 1
    idle_timeout_s: float = 60.0
    target_queue: int = 0
    buffer_replicas: int = 0

    def __post_init__(self) -> None:
        require(self.min_replicas >= 0, f"min_replicas must be 0 or more, not {self.min_replicas}")
        require(
            self.max_replicas >= max(1, self.min_replicas),
            f"max_replicas ({self.max_replicas}) must be at least 1 and at least min_replicas ({self.min_replicas})",
        )
        require(self.max_replicas <= 10_000, f"max_replicas must be at most 10000, not {self.max_replicas}")
        require(
            0 <= self.idle_timeout_s <= MAX_SECONDS,
            f"idle_timeout_s must be 0 to {MAX_SECONDS:g}, not {self.idle_timeout_s}",
        )
        require(0 <= self.target_queue <= 10**9, f"target_queue must be 0 to 1000000000, not {self.target_queue}")
        require(0 <= self.buffer_replicas <= 10_000, f"buffer_replicas must be 0 to 10000, not {self.buffer_replicas}")


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """How an `llm` or `embed` function is served. `dtype` "auto" is bfloat16 on a GPU, float32 on a CPU. What the
    prompt cache has no room for on the device goes to `host_cache_bytes` of pinned host memory. Up to `adapter_slots`
    adapters of at most `adapter_rank` are on the device at once. With `batch_invariant`, an answer's tokens and
    log-probabilities are the same bits whatever else the replica computes, at the price of speed."""

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    max_model_len: int = 0
    max_seqs: int = 64
    prefix_cache: bool = True
    host_cache_bytes: int = 0
    adapter_slots: int = 8
    adapter_rank: int = 16
    batch_invariant: bool = False

    def __post_init__(self) -> None:
        require(0 <= self.host_cache_bytes <= 2**45, f"host_cache_bytes must be 0 or more, not {self.host_cache_bytes}")
        require(1 <= self.max_seqs <= 4096, f"max_seqs must be 1 to 4096, not {self.max_seqs}")
        require(0 <= self.max_model_len <= 10**7, f"max_model_len must be 0 to 10000000, not {self.max_model_len}")
        require(0 <= self.adapter_slots <= 256, f"adapter_slots must be 0 to 256, not {self.adapter_slots}")
        require(1 <= self.adapter_rank <= MAX_RANK, f"adapter_rank must be 1 to {MAX_RANK}, not {self.adapter_rank}")
        invariant = self.batch_invariant
        require(isinstance(invariant, bool), f"batch_invariant must be true or false, not {invariant!r}")


@dataclass(frozen=True, slots=True)
class Limits:
    """Clocks in seconds (0 = none) and the number of attempts a job gets. `start_up_within_s` bounds a worker's own
    start; `start_within_s`, `run_within_s` and `finish_within_s` a job's wait, its run, and both together. For
    `retention_s` after its end a job can be read.

    The rest bounds what the function, or each tenant in it, may have: jobs waiting, jobs running, and requests and cost
    (estimated tokens of a language model, calls of a Python function) per minute; 0 = no limit."""

    start_up_within_s: float = 600
    start_within_s: float = 0
    run_within_s: float = 600
    finish_within_s: float = 0
    max_attempts: int = 3
    max_queued: int = 100_000
    retention_s: float = 3600
    max_queued_per_tenant: int = 0
    max_running: int = 0
    max_running_per_tenant: int = 0
    requests_per_minute: float = 0
    requests_per_minute_per_tenant: float = 0
    cost_per_minute: float = 0
    cost_per_minute_per_tenant: float = 0

    def __post_init__(self) -> None:
        for name in ("start_up_within_s", "start_within_s", "run_within_s", "finish_within_s"):
            value = getattr(self, name)
            require(0 <= value <= MAX_SECONDS, f"{name} must be 0 to {MAX_SECONDS:g} seconds, not {value}")
        # Who waits for a result reads it when it hears of the end, which must not be too late.
        require(
            LEAST_RETENTION_S <= self.retention_s <= MAX_SECONDS,
            f"retention_s must be {LEAST_RETENTION_S:g} to {MAX_SECONDS:g} seconds, not {self.retention_s}",
        )
        require(1 <= self.max_attempts <= 100, f"max_attempts must be 1 to 100, not {self.max_attempts}")
        require(1 <= self.max_queued <= 10**9, f"max_queued must be 1 to 1000000000, not {self.max_queued}")
        for name in ("max_running", *(each.name for each in fields(self) if "_per_" in each.name)):
            value = getattr(self, name)
            require(0 <= value <= 10**9, f"{name} must be 0 to 1000000000, not {value}")


@dataclass(frozen=True, slots=True)
class FunctionSpec:
    """One deployed version of a function. `name` is its full name; `born` is the same for all versions until the
    function is deleted.

    `weights` is the store URL of a published model (`llm`, `embed`); `code` is the SHA-256 of the bundle and `entry`
    the `module:attribute` in it (`python`). `input_schema` is what one input of it must look like, `takes` the
    parameters that it becomes, or of a model the tokens: versions that have both in common take each other's jobs. It
    runs with the variables of `env` and one for each of its owner's `secrets`, within `memory_mb` (0: unbounded). A
    `router` runs nothing itself: it names other functions. `webhook` is told of the ends of jobs that don't name their
    own. `public_prefix` is a text (of a chat: its system message) that an `llm`'s prompts begin with and that is
    nobody's secret: what was computed for it serves all tenants, what follows it its own tenant only. `adapters` maps
    names to the store URLs of published LoRA adapters of an `llm`: adapter "sql" of function "chat" is the model
    "chat:sql".
    """

    name: str
    kind: Kind
    app: str = ""
    version: str = ""
    born: str = ""
    weights: str = ""
    code: str = ""
    entry: str = ""
    gpu: str = ""
    batch: Batch | None = None
    concurrency: int = 1
    slo: SLO = field(default_factory=SLO)
    scaling: Scaling = field(default_factory=Scaling)
    model: ModelOptions = field(default_factory=ModelOptions)
    limits: Limits = field(default_factory=Limits)
    on_disconnect: Literal["abort", "detach"] = "abort"
    input_schema: dict[str, Any] | None = None
    takes: str = ""
    env: dict[str, str] = field(default_factory=dict)
    secrets: tuple[str, ...] = ()
    memory_mb: int = 0
    router: Router | None = None
    webhook: str = ""
    public_prefix: str = ""
    adapters: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_name(short_name(self.name))
        require(len(self.public_prefix) <= 10**5, "public_prefix must have at most 100000 characters")
        require(not owner_of(self.name) or bool(NAME.fullmatch(owner_of(self.name))), f"no owner: {self.name!r}")
        require(
            bool(VERSION.fullmatch(self.version)), "version must be up to 64 letters, digits, '.', '_', '+' and '-'"
        )
        require(self.kind in KINDS, f"kind must be one of {', '.join(KINDS)}, not {self.kind!r}")
        require((self.kind == "router") == bool(self.router), "a router, and nothing else, has 'router'")
        require(not self.router or self.scaling == Scaling(), "a router has no replicas: leave its 'scaling' out")
        require(
            self.kind in ("python", "router") or bool(self.weights),
            f"function {self.name!r} needs weights='s3://…' or 'file://…'",
        )
        require(1 <= self.concurrency <= 1024, f"concurrency must be 1 to 1024, not {self.concurrency}")
        require(0 <= self.memory_mb <= 1 << 24, f"memory_mb must be 0 to {1 << 24}, not {self.memory_mb}")
        check_environment(self.env, self.secrets)
        check_webhook(self.webhook)
        check_adapters(self)
        require(
            self.kind == "llm" or not self.model.batch_invariant,
            f"batch_invariant is for language models: leave it out for a function of kind {self.kind!r}",
        )

    @property
    def engine_options(self) -> ModelOptions:
        """`model` as an engine needs it: no more slots than there are adapters."""
        return replace(self.model, adapter_slots=min(self.model.adapter_slots, len(self.adapters)))

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "FunctionSpec":
        """Raises InvalidSpec for an unknown field, so that a newer client is told instead of half obeyed."""
        values = dict(data)
        if isinstance(values.get("router"), dict):
            values["router"] = Router.from_dict(values["router"])
        nested = {"batch": Batch, "slo": SLO, "scaling": Scaling, "model": ModelOptions, "limits": Limits}
        reject_unknown("function", values, cls)
        for name, kind in nested.items():
            if isinstance(values.get(name), dict):
                reject_unknown(name, values[name], kind)
                values[name] = kind(**values[name])
        values["secrets"] = tuple(values.get("secrets", ()))
        try:
            return cls(**values)
        except TypeError as error:
            raise InvalidSpec(str(error)) from error


def readable(records: Mapping[str, dict[str, Any]]) -> dict[str, FunctionSpec]:
    """The specs of stored records; one that this program can't read (of another release, say) is logged, not fatal."""
    specs = {}
    for name, record in records.items():
        try:
            specs[name] = FunctionSpec.from_dict(record)
        except InvalidSpec as error:
            tell_unreadable(name, str(error))
    return specs


@lru_cache(maxsize=1024)
def tell_unreadable(name: str, why: str) -> None:
    """Records are read several times a second: each trouble is logged once."""
    log.error("function %s is skipped, deploy it again: %s", name, why)


def check_name(name: str, what: str = "function") -> None:
    """Of what a person calls a function, without its owner, or an app."""
    require(
        len(name) <= 63 and bool(NAME.fullmatch(name)),
        f"{what} name {name!r} must be 1 to 63 of a-z, 0-9, '_' and '-', starting with a letter",
    )


def check_adapters(spec: FunctionSpec) -> None:
    adapters = spec.adapters
    require(not adapters or spec.kind == "llm", f"a function of kind {spec.kind!r} can't have adapters")
    require(not adapters or spec.model.adapter_slots > 0, "a function with adapters needs adapter_slots of 1 or more")
    require(len(adapters) <= MAX_ADAPTERS, f"a function can have {MAX_ADAPTERS} adapters, not {len(adapters)}")
    for name, url in adapters.items():
        require(
            len(name) <= 63 and bool(NAME.fullmatch(name)),
            f"adapter name {name!r} must be 1 to 63 of a-z, 0-9, '_' and '-', starting with a letter",
        )
        require(isinstance(url, str) and "://" in url, f"adapter {name!r} needs the URL of its store, not {url!r}")


def check_environment(env: Mapping[str, str], secrets: Sequence[str]) -> None:
    for name in secrets:
        fits = isinstance(name, str) and len(name) <= 63 and bool(NAME.fullmatch(name))
        require(fits, f"secret name {name!r} must be 1 to 63 of a-z, 0-9, '_' and '-', starting with a letter")
    names = [*env, *(variable_of(name) for name in secrets)]
    for name in names:
        require(
            bool(VARIABLE.fullmatch(name)) and not name.startswith("STOKER_"),
            f"{name!r} can't be an environment variable here: use A-Z, 0-9 and '_'; STOKER_… are stoker's own",
        )
    for name, value in env.items():
        require(isinstance(value, str) and "\0" not in value, f"the variable {name!r} must be text, not {value!r}")
    require(len(set(names)) == len(names), f"an environment variable is set twice: {', '.join(sorted(names))}")


def check_webhook(url: str) -> None:
    try:
        if url:
            target_of(url)
    except InvalidTarget as problem:
        raise InvalidSpec(f"webhook {url!r} can't be called: {problem}") from None


def variable_of(secret: str) -> str:
    """The environment variable in which a function finds a secret."""
    return secret.upper().replace("-", "_")


def full_name(owner: str, name: str) -> str:
    """What a function is called inside. The operator's (owner "") are shared with all tenants and keep their names."""
    return f"{owner}.{name}" if owner else name


def adapted_name(name: str, adapter: str) -> str:
    """Of the model that callers ask for."""
    return f"{name}:{adapter}" if adapter else name


def base_and_adapter(model: str) -> tuple[str, str]:
    """The function and the adapter that a model's name means; without one, the adapter is ""."""
    base, _, adapter = model.partition(":")
    return base, adapter


def owner_of(full: str) -> str:
    return full.rpartition(".")[0]


def short_name(full: str) -> str:
    """The name by which its owner knows it."""
    return full.rpartition(".")[2]
