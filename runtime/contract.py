"""What a job's input was made for: versions of a function that have the same contract take each other's jobs."""

import hashlib
import json

from stoker.runtime.spec import FunctionSpec

MOST_KNOWN = 10_000
DIGITS = 12
KNOWN: dict[str, tuple[FunctionSpec, str]] = {}


def contract_of(spec: FunctionSpec) -> str:
    """How the input becomes a call, ":", and a digest of all that the gateway made or checked it by."""
    known, contract = KNOWN.get(spec.name, (None, ""))
    if known is not spec:
        contract = made_of(spec)
        if len(KNOWN) >= MOST_KNOWN:
            KNOWN.clear()
        KNOWN[spec.name] = spec, contract
    return contract


def made_of(spec: FunctionSpec) -> str:
    if spec.kind == "python":
        way, facts = "fields" if spec.takes.startswith("{") else "value", [spec.takes, spec.input_schema]
    else:
        way, facts = "tokens", [spec.takes or spec.weights, spec.model.max_model_len]
    text = json.dumps([spec.kind, *facts], sort_keys=True)
    return f"{way}:{hashlib.sha256(text.encode()).hexdigest()[:DIGITS]}"


def may_try(made_for: str, own: str) -> bool:
    """Whether a version with the contract `own` may look at an input whether it fits. Tokens of another tokenizer can't
    be told from its own, nor can fields from a value that is an object. "": nobody said what it was made for."""
    way = made_for.partition(":")[0]
    return made_for in ("", own) or (way != "tokens" and way == own.partition(":")[0])
