import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from stoker.runtime.cli import app
from stoker.runtime.controller.policy import decide
from stoker.runtime.controller.policy_state import Pool, Rules
from stoker.runtime.simulator import scenarios, traces
from stoker.runtime.simulator.cluster import Faults, Setup
from stoker.runtime.simulator.measured import ASSUMED, MEASURED, Starts
from stoker.runtime.simulator.references import Fixed, IdleTimeout, Keda, Kpa, Reference, Seen, Steps
from stoker.runtime.simulator.replicas import Batch, Slots
from stoker.runtime.simulator.report import plot, quantile
from stoker.runtime.simulator.simulation import Outcome, Simulation
from stoker.runtime.simulator.traces import IMAGE, Request
from stoker.runtime.spec import FunctionSpec, Scaling

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"
QUICK = Starts(cold_s=10.0, warm_s=4.0, boot_s=20.0, spread=0.0)


def images(rate: float, seconds: float, seed: int = 0) -> list[Request]:
    times = traces.arrivals(traces.poisson(rate), rate, seconds, random.Random(seed))
    return traces.requests(times, IMAGE, seed)


def run(trace: list[Request], setup: Setup | None = None, scaler: object = decide) -> Outcome:
    return Simulation(setup or scenarios.setup_for(trace, starts=QUICK), trace, scaler).run()  # type: ignore[arg-type]


def test_the_same_seed_gives_the_same_simulation() -> None:
    trace = images(0.5, 300)
    assert trace == images(0.5, 300)
    assert run(trace) == run(trace)
    other = replace(scenarios.setup_for(trace, starts=replace(QUICK, spread=0.2)), seed=1)
    assert run(trace, other) != run(trace, replace(other, seed=2))


def test_the_first_request_waits_for_boot_and_load_and_the_next_does_not() -> None:
    trace = [Request(1.0, service_s=2.0), Request(60.0, service_s=2.0)]
    setup = replace(scenarios.setup_for(trace, starts=QUICK), pools=(Pool("gpu", 3600.0, boot_s=20.0),))
    outcome = run(trace, setup)
    assert outcome.cold == [True, False]
    assert 24.0 <= outcome.ttft_s[0] <= 40.0, "boot (spread by a tenth), load, and two ticks"
    assert outcome.ttft_s[1] == 0.0
    assert outcome.cost_usd == pytest.approx(59.0, abs=0.1), "a dollar a second, from the first request on"


def test_no_policy_takes_a_busy_replica_away() -> None:
    trace = images(1.0, 600)
    for scaler in (decide, Reference(Kpa), Reference(Keda), Reference(Steps), Reference(IdleTimeout)):
        outcome = run(trace, scaler=scaler)
        assert outcome.busy_kills == 0 and max(outcome.ttft_s) < float("inf")


def test_interrupted_hosts_lose_no_request() -> None:
    trace = images(1.0, 900)
    plain = scenarios.setup_for(trace, starts=QUICK)
    pools = tuple(replace(pool, spot=True) for pool in plain.pools)
    outcome = run(trace, replace(plain, pools=pools, faults=Faults(interruptions_per_h=20.0)))
    assert max(outcome.ttft_s) < float("inf")
    assert outcome.launches > run(trace, plain).launches


def test_a_pool_that_refuses_is_replaced_by_the_next_and_asked_again_later() -> None:
    trace = images(0.2, 600)
    pools = (Pool("spot", 1.0, max_hosts=9, boot_s=20.0), Pool("plain", 3.0, max_hosts=9, boot_s=20.0))
    plain = replace(scenarios.setup_for(trace, starts=QUICK), pools=pools)
    refused = run(trace, replace(plain, faults=Faults(refusals=(("spot", 0.0, 1e9),))))
    assert max(refused.ttft_s) < float("inf")
    assert refused.cost_usd > 2 * run(trace, plain).cost_usd


def test_work_that_comes_by_the_clock_finds_replicas_ready() -> None:
    trace = [Request(120.0 * i, service_s=2.0) for i in range(1, 40)]
    setup = scenarios.setup_for(trace, starts=QUICK, idle_timeout_s=0.0)
    forecast = run(trace, replace(setup, rules=Rules(prewarm_usd_per_h=4.0)))
    without = run(trace, replace(setup, rules=Rules(prewarm_usd_per_h=0.0)))
    assert sum(without.cold) == len(trace)
    assert sum(forecast.cold[20:]) == 0
    assert forecast.cost_usd < run(trace, setup, Reference(Fixed)).cost_usd


def test_a_batch_slows_down_as_it_grows_and_prefills_stop_it() -> None:
    alone = Batch(64, MEASURED)
    first = alone.admit(0.0, 0, Request(0.0, prompt_tokens=41_812, output_tokens=100))
    assert first == pytest.approx(1.0 + 0.004198)
    assert alone.next_end() == pytest.approx(1.0 + 100 * 0.004198)
    shared = Batch(64, MEASURED)
    for job in range(64):
        shared.admit(0.0, job, Request(0.0, output_tokens=100))
    assert shared.next_end() == pytest.approx(100 * 0.007079)
    assert shared.take_ended(shared.next_end()) == list(range(64)) and not shared.jobs


def test_slots_run_each_job_for_its_own_time() -> None:
    slots = Slots(2)
    slots.admit(0.0, 0, Request(0.0, service_s=5.0))
    slots.admit(1.0, 1, Request(1.0, service_s=1.0))
    assert slots.next_end() == 2.0 and slots.take_ended(2.0) == [1] and slots.next_end() == 5.0


def test_the_measured_times_are_those_of_the_benchmarks() -> None:
    engine = json.loads((RESULTS / "engine-llama3-8b-gpu.json").read_text())["results"]["results"]
    values = {row["what"]: row["value"] for row in engine}
    for size, name in ((1, "batch 1: per token"), (8, "decode 8"), (64, "decode 64"), (256, "decode 256")):
        assert MEASURED.step_s(size) == pytest.approx(values[name] / 1000, rel=0.15)
    assert MEASURED.prefill_per_s == pytest.approx(values["prefill"], rel=0.15)
    loads = json.loads((RESULTS / "first_token-8b-gpu.json").read_text())["results"]
    starts = {run["kind"]: [e["start_s"] for e in run["timeline"] if e["name"] == "run"] for run in loads}
    assert [ASSUMED.cold_s] == pytest.approx(starts["cold"], rel=0.15)
    assert [ASSUMED.warm_s] == pytest.approx(starts["warm"], rel=0.15)


def seen(now: float, queued: int, running: int, ready: int) -> Seen:
    spec = FunctionSpec("f", "python", concurrency=10, scaling=Scaling(0, 50))
    return Seen(now, spec, queued, running, ready, ready, {})


def test_kpa_follows_its_documentation() -> None:
    kpa = Kpa()
    assert [kpa(seen(float(t), 0, 14, 2)) for t in range(60)][-1] == 2, "14 at 70 % of 10 each"
    assert kpa(seen(60.0, 300, 20, 2)) > 4, "panic: six seconds ask for more than twice what is ready"
    in_panic = [kpa(seen(61.0 + t, 0, 0, 10)) for t in range(30)]
    assert in_panic == sorted(in_panic), "never down in panic"
    wishes = [kpa(seen(91.0 + t, 0, 0, 10)) for t in range(200)]
    assert wishes[-1] == 5, "at most half of the ready ones go at a time"
    idle = Kpa()
    idle(seen(0.0, 1, 0, 0))
    after = [idle(seen(1.0 + t, 0, 0, 1)) for t in range(120)]
    assert after[58] == 1 and after[80] == 1 and after[95] == 0, "a window of 60 s and 30 s of grace"


def test_keda_polls_and_waits_before_it_goes_down() -> None:
    keda = Keda()
    assert keda(seen(0.0, 25, 0, 0)) == 3
    assert keda(seen(29.0, 400, 0, 3)) == 3, "not looked at yet"
    assert keda(seen(30.0, 400, 0, 3)) == 40
    assert keda(seen(300.0, 0, 1, 40)) == 40 and keda(seen(331.0, 0, 1, 40)) == 1
    assert keda(seen(700.0, 0, 0, 1)) == 0


def test_steps_climb_and_come_down_one_at_a_time() -> None:
    steps = Steps()
    assert steps(seen(0.0, 5, 0, 0)) == 1
    assert steps(seen(61.0, 100, 10, 1)) == 4
    assert steps(seen(122.0, 0, 5, 4)) == 4, "within the cooldown"
    assert steps(seen(400.0, 0, 5, 4)) == 3 and steps(seen(600.0, 0, 5, 3)) == 2


def test_an_idle_replica_stays_for_its_window() -> None:
    policy = IdleTimeout(window_s=60.0)
    spec = FunctionSpec("f", "python", concurrency=10, scaling=Scaling(0, 50))
    assert policy(Seen(100.0, spec, 15, 0, 0, 0, {})) == 2
    assert policy(Seen(100.0, spec, 0, 3, 2, 2, {"a": 41.0})) == 2
    assert policy(Seen(102.0, spec, 0, 3, 2, 2, {"a": 41.0})) == 1


def test_quantiles_are_nearest_ranks() -> None:
    values = [float(i) for i in range(1, 101)]
    assert (quantile(values, 0.5), quantile(values, 0.99), quantile([float("inf")], 0.5)) == (50.0, 99.0, None)


def test_the_command_prints_a_row_per_policy_and_a_plot(tmp_path: Path) -> None:
    file = tmp_path / "trace.csv"
    rows = "".join(f"{10 * i},f,2.0\n" for i in range(30))
    file.write_text("time,function,service_s\n" + rows)
    arguments = ["simulate", "--trace", str(file), "--json", "--boot", "20", "--plot", str(tmp_path / "plot.svg")]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert [row["policy"] for row in found["rows"]] == [policy.name for policy in scenarios.defaults()]
    assert all(row["requests"] == 30 and row["cost_usd"] > 0 for row in found["rows"])
    assert (tmp_path / "plot.svg").read_text().count("<circle") == len(found["rows"])
    assert plot([], "nothing").startswith("<svg")


@pytest.mark.parametrize("text", ["", "time\n1\n", "time,service_s\nsoon,1\n", "time,service_s\n-1,2\n"])
def test_a_bad_trace_says_what_it_needs(tmp_path: Path, text: str) -> None:
    file = tmp_path / "trace.csv"
    file.write_text(text)
    with pytest.raises(traces.BadTrace, match="trace.csv"):
        traces.read(file)
    assert CliRunner().invoke(app, ["simulate", "--trace", str(file)]).exit_code == 2


def test_traces_survive_being_written(tmp_path: Path) -> None:
    trace = [Request(0.5, "chat", 0.0, 100, 20), Request(1.25, "image", 3.5)]
    traces.write(tmp_path / "t.jsonl", reversed(trace))
    assert traces.read(tmp_path / "t.jsonl") == trace


def test_synthetic_shapes_have_the_rates_they_name() -> None:
    assert len(images(2.0, 1000)) == pytest.approx(2000, rel=0.1)
    day = traces.diurnal(1.0, 3.0, 1000.0)
    assert (day(0), day(500)) == (1.0, 3.0)
    crowd = traces.flash_crowd(1.0, 11.0, 100.0, 10.0, 50.0)
    assert (crowd(99), crowd(105), crowd(140)) == (1.0, 6.0, 11.0) and crowd(1000) == pytest.approx(1.0, abs=0.01)
    on_time = traces.timetable(100.0, 5, 0.0, 1000.0, random.Random(0))
    assert len(on_time) == 45 and all(0 <= time % 100.0 <= 1.0 for time in on_time)


@pytest.mark.parametrize("name", ["chat.jsonl", "images.csv"])
def test_the_example_traces_can_be_replayed(name: str) -> None:
    trace = traces.read(RESULTS.parents[1] / "examples" / "traces" / name)
    assert len(trace) > 50
    assert max(run(trace).ttft_s) < float("inf")
