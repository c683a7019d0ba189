from dataclasses import replace
from typing import Any

import pytest

from stoker.queue.records import Backlog, Job, JobState
from stoker.runtime.gateway.cluster_view import Snapshot
from stoker.runtime.gateway.waiting import wait_reason
from stoker.runtime.spec import FunctionSpec

JOB = Job(
    id="chat-01",
    function="chat",
    tenant="default",
    state=JobState.QUEUED,
    attempt=0,
    max_attempts=3,
    priority=1,
    stream=True,
    enqueued_ms=0,
    started_ms=None,
    finished_ms=None,
    worker="",
    reason="",
    error=None,
    result=None,
    usage=None,
    notes=None,
    queued_ahead=0,
)
BACKLOG = Backlog("chat", 12, 3, 0, 5, 1.0, 1.0, 5)


def replica(state: str, **fields: Any) -> dict[str, Any]:
    plain = {"function": "chat", "version": "1", "loaded_bytes": 0, "total_bytes": 0, "error": None}
    return {**plain, "state": state, **fields}


def host(*replicas: dict[str, Any]) -> dict[str, Any]:
    return {"id": "h", "device": "cpu", "replicas": {f"r{i}": replica for i, replica in enumerate(replicas)}}


FAILED = replica("failed", error={"type": "cold_start_error", "message": "shard 2 is missing"})


@pytest.mark.parametrize(
    ("hosts", "wanted", "reason"),
    [
        ([], 0, "no host available"),
        ([], 1, "starting host"),
        ([host()], 1, "queued"),
        ([host(replica("starting"))], 1, "starting worker"),
        ([host(replica("loading"))], 1, "loading weights"),
        ([host(replica("loading", loaded_bytes=43, total_bytes=100))], 1, "loading weights 43 %"),
        (
            [host(replica("loading", loaded_bytes=1, total_bytes=100)),
             host(replica("loading", loaded_bytes=70, total_bytes=100))],
            2,
            "loading weights 70 %",
        ),
        ([host(replica("loading", step="importing its code"))], 1, "starting worker: importing its code"),
        ([host(FAILED)], 1, "worker failing: shard 2 is missing"),
        ([host(FAILED, replica("loading", loaded_bytes=1, total_bytes=2))], 1, "loading weights 50 %"),
        ([host(replica("failed"))], 1, "worker failing: no reason reported"),
        ([host(replica("ready"), FAILED)], 1, "queued"),
        ([host(replica("ready", function="other"))], 1, "queued"),
        ([host(replica("draining"))], 1, "queued"),
    ],
)  # fmt: skip
def test_reasons(hosts: list[dict[str, Any]], wanted: int, reason: str) -> None:
    assert wait_reason(JOB, BACKLOG, hosts, wanted) == reason


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("host_booting", "starting host: so it is"),
        ("no_capacity", "so it is"),
        ("max_hosts", "so it is"),
        ("no_fitting_pool", "so it is"),
        ("busy", "no host available"),
    ],
)
def test_what_the_controller_says_about_hosts(code: str, said: str) -> None:
    reason = {"code": code, "message": "so it is", "eta_s": None}
    assert wait_reason(JOB, BACKLOG, [], reason=reason) == said
    assert wait_reason(JOB, BACKLOG, [], wanted_hosts=1, reason=reason) == "starting host"
    assert wait_reason(JOB, BACKLOG, [host(replica("starting"))], reason=reason) == "starting worker"


def test_behind_others_says_how_many() -> None:
    waiting = replace(JOB, queued_ahead=4)
    assert wait_reason(waiting, BACKLOG, [host(replica("ready"))]) == "queued behind 4 of 12"
    assert wait_reason(replace(waiting, queued_ahead=20), BACKLOG, [host(replica("ready"))]) == "queued behind 20 of 21"


def test_retries_say_which_attempt_comes_next() -> None:
    retrying = replace(JOB, state=JobState.RETRYING, attempt=1)
    assert wait_reason(retrying, BACKLOG, [host(replica("ready"))]) == "retrying (attempt 2 of 3)"
    assert wait_reason(retrying, BACKLOG, [host()]) == "restarting after a lost attempt"


@pytest.mark.parametrize("state", [state for state in JobState if state.terminal or state is JobState.RUNNING])
def test_only_waiting_jobs_have_a_reason(state: JobState) -> None:
    assert wait_reason(replace(JOB, state=state), BACKLOG, [host()]) == ""


def test_long_failures_are_cut() -> None:
    failed = replica("failed", error={"message": "x" * 5000})
    assert len(wait_reason(JOB, BACKLOG, [host(failed)])) < 300


@pytest.mark.parametrize(
    ("replicas", "reason", "said"),
    [
        ([replica("ready", version="1")], None, ""),
        ([replica("ready", version="1"), replica("loading", version="2")], None, ": loading weights"),
        ([replica("ready", version="1"), replica("starting", version="2")], None, ": starting worker"),
        ([replica("ready", version="1")], {"code": "no_fitting_pool", "message": "no host has a GPU"}, ": no host has"),
    ],
)
def test_what_is_kept_for_another_version_says_which_and_how_that_stands(
    replicas: list[dict[str, Any]], reason: dict[str, Any] | None, said: str
) -> None:
    deployed = FunctionSpec(name="chat", kind="python", version="2")
    view = Snapshot({"chat": deployed}, {"chat": BACKLOG}, [host(*replicas)], 1, {}, {"reasons": {"chat": reason}})
    if reason is None:
        view = replace(view, fleet={})
    kept = replace(JOB, queued_ahead=None, aside=True)
    why = view.why_waiting(kept)
    own = "its input is for version 2, which does not serve yet"
    assert why.startswith(own + said) if said else why == own
    assert view.why_waiting(replace(kept, aside=False)) == "queued"
    assert view.eta_s(kept) is None
