"""What a deployed function is: the record that SDK, gateway, controller and host agent share."""

import re
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

Kind = Literal["llm", "embed", "python"]

NAME = re.compile(r"^[a-z][a-z0-9_]*(-[a-z0-9_]+)*$")


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
    """Latency goals in milliseconds: time to first token and inter-token latency."""

    ttft_ms: float | None = None
    itl_ms: float | None = None


@dataclass(frozen=True, slots=True)
class Scaling:
    """Replica bounds; `idle_timeout_s` without work takes a replica away, down to `min_replicas`."""

    min_replicas: int = 0
    max_replicas: int = 1
    idle_timeout_s: float = 60.0
    target_queue: int = 16

    def __post_init__(self) -> None:
        require(self.min_replicas >= 0, f"min_replicas must be 0 or more, not {self.min_replicas}")
        require(
            self.max_replicas >= max(1, self.min_replicas),
            f"max_replicas ({self.max_replicas}) must be at least 1 and at least min_replicas ({self.min_replicas})",
        )
        require(self.idle_timeout_s >= 0, f"idle_timeout_s must be 0 or more, not {self.idle_timeout_s}")
        require(self.target_queue >= 1, f"target_queue must be 1 or more, not {self.target_queue}")


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """How an `llm` or `embed` function is served. `dtype` "auto" is bfloat16 on a GPU, float32 on a CPU."""

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    max_model_len: int = 0
    max_seqs: int = 64
    prefix_cache: bool = True


@dataclass(frozen=True, slots=True)
class Limits:
    """Clocks in seconds (0 = none) and the number of attempts a job gets."""

    start_within_s: float = 0
    run_within_s: float = 600
    finish_within_s: float = 0
    max_attempts: int = 3
    max_queued: int = 100_000
    retention_s: float = 3600


@dataclass(frozen=True, slots=True)
class FunctionSpec:
    """One deployed version of a function.

    `weights` is the store URL of a published model (`llm`, `embed`); `code` is the SHA-256 of the bundle and
    `entry` the `module:attribute` in it (`python`).
    """

    name: str
    kind: Kind
    app: str = ""
    version: str = ""
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
        check_name(self.name)
        require(self.kind in ("llm", "embed", "python"), f"kind must be llm, embed or python, not {self.kind!r}")
        require(
            self.kind == "python" or bool(self.weights), f"function {self.name!r} needs weights='s3://…' or 'file://…'"
        )
        require(self.concurrency >= 1, f"concurrency must be 1 or more, not {self.concurrency}")

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


def check_name(name: str) -> None:
    require(
        len(name) <= 63 and bool(NAME.match(name)),
        f"function name {name!r} must be 1 to 63 of a-z, 0-9, '_' and '-', starting with a letter",
    )


def require(condition: bool, message: str) -> None:
    if not condition:
        raise InvalidSpec(message)


def reject_unknown(what: str, values: dict[str, Any], kind: type) -> None:
    unknown = set(values) - {f.name for f in fields(kind)}
    require(not unknown, f"unknown {what} field(s): {', '.join(sorted(unknown))}")
