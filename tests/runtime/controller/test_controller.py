from stoker.runtime.controller.controller import awake, placed_replica
from stoker.runtime.controller.policy_state import Decision, Placed


def replica(function: str, state: str = "ready", draining: bool = False) -> Placed:
    return Placed(f"{function}-1", function, "v1", "h0", "cpu", state, draining=draining)


def test_only_of_a_function_that_takes_work_a_first_job_is_no_reason_to_look() -> None:
    keep = (replica("serves"), replica("starts", "loading"), replica("drains", draining=True), replica("ends"))
    assert awake(Decision(keep, (), {}, drain=("ends-1",))) == {b"serves"}


def test_a_report_tells_whether_a_replica_that_failed_had_been_ready() -> None:
    record = {"spec": {"name": "f", "version": "v1"}, "device": "cpu"}
    for cold_start, was_ready in ((None, False), ({"records": []}, True)):
        report = {"state": "failed", "settled": True, "cold_start": cold_start}
        assert placed_replica("f-1", record, "h0", report).was_ready is was_ready
