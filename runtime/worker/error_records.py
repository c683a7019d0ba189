"""Errors of a load or of the object store as records for the jobs that they end."""

import logging
from typing import Any

from stoker.coldstart.failures import ColdStartError

log = logging.getLogger("stoker.worker")


def store_record(error: ColdStartError) -> dict[str, Any]:
    return {"type": "internal_error", "message": str(error), "code": type(error).__name__, "traceback": None}


def cold_start_record(error: ColdStartError) -> dict[str, Any]:
    return {"type": "cold_start_error", "message": str(error), "code": type(error).__name__, "facts": error.as_dict()}


def start_record(error: Exception, limit_s: float) -> dict[str, Any]:
    """Of a replica's start, that may take `limit_s`; what nobody expected is logged."""
    if isinstance(error, ColdStartError):
        return cold_start_record(error)
    if isinstance(error, TimeoutError):
        message = f"the worker was not ready after {limit_s:g} s, the limit of its start"
        return {"type": "timeout_error", "message": message, "code": "start_timed_out"}
    log.error("a replica's start", exc_info=error)
    message = f"{type(error).__name__}: {error}"
    return {"type": "cold_start_error", "message": message, "code": type(error).__name__}
