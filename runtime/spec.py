"""What a deployed function is: the record that SDK, gateway, controller and host agent share."""

import logging
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

Kind = Literal["llm", "embed", "python"]

NAME = re.compile(r"[a-z][a-z0-9_]*(-[a-z0-9_]+)*")
VERSION = re.compile(r"[A-Za-z0-9._+-]{0,64}")
MAX_SECONDS = 1e9

log = logging.getLogger("stoker.spec")


class InvalidSpec(ValueError):
    """A function was declared with a value that can't work; the message says which and what to write instead."""


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
    prompt cache has no room for on the device goes to `host_cache_bytes` of pinned host memory."""

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    max_model_len: int = 0
    max_seqs: int = 64
    prefix_cache: bool = True
    host_cache_bytes: int = 0

    def __post_init__(self) -> None:
        require(0 <= self.host_cache_bytes <= 2**45, f"host_cache_bytes must be 0 or more, not {self.host_cache_bytes}")
        require(1 <= self.max_seqs <= 4096, f"max_seqs must be 1 to 4096, not {self.max_seqs}")
        require(0 <= self.max_model_len <= 10**7, f"max_model_len must be 0 to 10000000, not {self.max_model_len}")


@dataclass(frozen=True, slots=True)
class Limits:
    """Clocks in seconds (0 = none) and the number of attempts a job gets. `start_up_within_s` bounds a worker's own
    start; `start_within_s`, `run_within_s` and `finish_within_s` a job's wait, its run, and both together.

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
        for name in ("start_up_within_s", "start_within_s", "run_within_s", "finish_within_s", "retention_s"):
            value = getattr(self, name)
            require(0 <= value <= MAX_SECONDS, f"{name} must be 0 to {MAX_SECONDS:g} seconds, not {value}")
        require(1 <= self.max_attempts <= 100, f"max_attempts must be 1 to 100, not {self.max_attempts}")
        require(1 <= self.max_queued <= 10**9, f"max_queued must be 1 to 1000000000, not {self.max_queued}")
        for name in ("max_running", *(each.name for each in fields(self) if "_per_" in each.name)):
            value = getattr(self, name)
            require(0 <= value <= 10**9, f"{name} must be 0 to 1000000000, not {value}")


@dataclass(frozen=True, slots=True)
class FunctionSpec:
    """One deployed version of a function. `name` is its full name; `born` is the same for all versions until the
    function is deleted.

    `weights` is the store URL of a published model (`llm`, `embed`); `code` is the SHA-256 of the bundle and
    `entry` the `module:attribute` in it (`python`).
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

    def __post_init__(self) -> None:
        check_name(short_name(self.name))
        require(not owner_of(self.name) or bool(NAME.fullmatch(owner_of(self.name))), f"no owner: {self.name!r}")
        require(
            bool(VERSION.fullmatch(self.version)), "version must be up to 64 letters, digits, '.', '_', '+' and '-'"
        )
        require(self.kind in ("llm", "embed", "python"), f"kind must be llm, embed or python, not {self.kind!r}")
        require(
            self.kind == "python" or bool(self.weights), f"function {self.name!r} needs weights='s3://…' or 'file://…'"
        )
        require(1 <= self.concurrency <= 1024, f"concurrency must be 1 to 1024, not {self.concurrency}")

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "FunctionSpec":
        """Raises InvalidSpec for an unknown field, so that a newer client is told instead of half obeyed."""
        values = dict(data)
        nested = {"batch": Batch, "slo": SLO, "scaling": Scaling, "model": ModelOptions, "limits": Limits}
        reject_unknown("function", values, cls)
        for name, kind in nested.items():
            if isinstance(values.get(name), dict):
                reject_unknown(name, values[name], kind)
                values[name] = kind(**values[name])
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
            log.error("function %s is skipped, deploy it again: %s", name, error)
    return specs


def check_name(name: str) -> None:
    """Of what a person calls a function, without its owner."""
    require(
        len(name) <= 63 and bool(NAME.fullmatch(name)),
        f"function name {name!r} must be 1 to 63 of a-z, 0-9, '_' and '-', starting with a letter",
    )


def full_name(owner: str, name: str) -> str:
    """What a function is called inside. The operator's (owner "") are shared with all tenants and keep their names."""
    return f"{owner}.{name}" if owner else name


def owner_of(full: str) -> str:
    return full.rpartition(".")[0]


def short_name(full: str) -> str:
    """The name by which its owner knows it."""
    return full.rpartition(".")[2]


def require(condition: bool, message: str) -> None:
    if not condition:
        raise InvalidSpec(message)


def reject_unknown(what: str, values: dict[str, Any], kind: type) -> None:
    unknown = set(values) - {f.name for f in fields(kind)}
    require(not unknown, f"unknown {what} field(s): {', '.join(sorted(unknown))}")
