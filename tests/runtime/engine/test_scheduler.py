from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import pytest

from stoker.runtime.engine.blocks import BlockPool
from stoker.runtime.engine.request import Delta, GenerationRequest, SamplingParams
from stoker.runtime.engine.scheduler import LOOKAHEAD, MAX_OVERTAKES, Outcome, Scheduler, Work
from stoker.runtime.engine.sequence import Sequence
from stoker.runtime.pool.leeway import Leeway


class Room(Leeway):
    """As much as a test says."""

    def __init__(self) -> None:
        super().__init__(64)
        self.room = 64
        self.asked: list[list[int]] = []

    def tokens(self, others: Seq[int], step: int) -> int:
        self.asked.append([*others])
        return self.room


@dataclass
class Bench:
    """A scheduler whose model always samples `token`."""

    blocks: int = 64
    budget: int = 64
    max_seqs: int = 8
    prefix_cache: bool = True
    token: int = 1
    arrivals: int = 0
    leeway: Room = field(init=False)
    scheduler: Scheduler = field(init=False)

    def __post_init__(self) -> None:
        self.leeway = Room()
        self.scheduler = Scheduler(
            BlockPool(self.blocks),
            token_budget=self.budget,
            max_seqs=self.max_seqs,
            prefix_cache=self.prefix_cache,
            leeway=self.leeway,
        )

    def add(
        self, name: str, prompt: Seq[int] | int, max_tokens: int = 100, salt: bytes = b"", patient: bool = False
    ) -> Sequence:
        """A number stands for a prompt of that many tokens that shares nothing with others."""
        self.arrivals += 1
        tokens = [1000 * self.arrivals + i for i in range(prompt)] if isinstance(prompt, int) else prompt
        request = GenerationRequest(name, tokens, SamplingParams(max_tokens), patient=patient)
        sequence = Sequence.of(request, self.arrivals, b"root" + salt, eos=(2,))
        self.scheduler.add(sequence)
        return sequence

    def step(self, **errors: str) -> tuple[list[tuple[str, int, int]], list[Delta]]:
        work = self.scheduler.schedule()
        outcomes = [Outcome(self.token, errors.get(item.sequence.id, "")) for item in work]
        return brief(work), self.scheduler.commit(work, outcomes)

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()

    def running(self) -> list[str]:
        return [sequence.id for sequence in self.scheduler.running]

    def waiting(self) -> list[str]:
        return [sequence.id for sequence in self.scheduler.waiting]


def brief(work: Seq[Work]) -> list[tuple[str, int, int]]:
    return [(item.sequence.id, item.start, item.count) for item in work]


def test_a_long_prompt_is_computed_in_chunks_and_samples_after_the_last() -> None:
    bench = Bench(budget=20, max_seqs=4)
    bench.add("a", 50)
    plan, deltas = bench.step()
    assert (plan, deltas) == ([("a", 0, 20)], [])
    assert bench.step() == ([("a", 20, 20)], [])
    plan, deltas = bench.step()
    assert plan == [("a", 40, 10)]
    assert [(d.request_id, d.tokens) for d in deltas] == [("a", [1])]
    assert bench.step()[0] == [("a", 50, 1)]


def test_decoding_goes_on_beside_a_long_prompt_and_never_waits_for_it() -> None:
    bench = Bench(budget=20, max_seqs=4)
    bench.add("long", 100)
    bench.add("short", 5)
    bench.steps(5)
    assert bench.step()[0] == [("long", 100, 1), ("short", 0, 5)]
    bench.add("next", 100)
    assert bench.step()[0] == [("short", 5, 1), ("long", 101, 1), ("next", 0, 18)]
    assert bench.step()[0] == [("short", 6, 1), ("long", 102, 1), ("next", 18, 18)]


def test_decoding_goes_first_even_if_the_long_prompt_came_earlier() -> None:
    bench = Bench(blocks=12, budget=20, max_seqs=4, prefix_cache=False)
    holder = bench.add("holder", 16)
    bench.step()
    bench.add("long", 160)
    bench.add("short", 5)
    assert bench.step()[0] == [("holder", 16, 1), ("short", 0, 5)]
    bench.scheduler.remove(holder)
    assert bench.step()[0] == [("short", 5, 1), ("long", 0, 19)]
    assert bench.running() == ["long", "short"]
    assert bench.step()[0] == [("short", 6, 1), ("long", 19, 19)]


def test_at_most_max_seqs_run() -> None:
    bench = Bench(max_seqs=2)
    for name in "abc":
        bench.add(name, 3, max_tokens=2)
    bench.step()
    assert (bench.running(), bench.waiting()) == (["a", "b"], ["c"])
    bench.step()
    bench.step()
    assert bench.running() == ["c"]


def test_ends_are_reported_once_and_free_everything() -> None:
    bench = Bench(prefix_cache=False)
    bench.add("a", 20, max_tokens=2)
    assert bench.step()[1] == [Delta("a", [1], None, "", 20, 0)]
    assert bench.step()[1] == [Delta("a", [1], "length", "", 20, 0)]
    assert (bench.scheduler.pool.free, bench.running()) == (64, [])


def test_the_end_token_is_not_reported() -> None:
    bench = Bench(token=2)
    bench.add("a", 20)
    assert bench.step()[1] == [Delta("a", [], "stop", "", 20, 0)]


def test_a_finished_prefix_is_reused_but_one_token_is_always_computed() -> None:
    bench = Bench()
    prompt = list(range(32))
    bench.add("a", prompt, max_tokens=1)
    bench.step()
    bench.add("same", prompt, max_tokens=1)
    bench.add("longer", [*prompt, 7, 8], max_tokens=1)
    plan, deltas = bench.step()
    assert plan == [("same", 16, 16), ("longer", 32, 2)]
    assert [d.cached_tokens for d in deltas] == [16, 32]
    assert bench.scheduler.hit_tokens == 48


def test_generated_tokens_are_reused_too() -> None:
    bench = Bench()
    bench.add("a", list(range(10)), max_tokens=30)
    bench.steps(30)
    bench.add("b", [*range(10), *[1] * 30])
    assert bench.step()[0] == [("b", 32, 8)]


def test_without_prefix_cache_nothing_is_reused() -> None:
    bench = Bench(prefix_cache=False)
    for name in "ab":
        bench.add(name, list(range(32)), max_tokens=1)
        assert bench.step()[0] == [(name, 0, 32)]
    assert bench.scheduler.pool.cached == 0


def test_another_salt_shares_nothing() -> None:
    bench = Bench()
    bench.add("a", list(range(32)), max_tokens=1, salt=b"x")
    bench.step()
    bench.add("b", list(range(32)), max_tokens=1, salt=b"y")
    assert bench.step()[0] == [("b", 0, 32)]


def test_a_burst_with_a_shared_prefix_computes_it_once() -> None:
    bench = Bench(budget=40)
    shared = list(range(64))
    for i, name in enumerate("abcd"):
        bench.add(name, [*shared, 100 + i])
    bench.add("other", 10)
    assert bench.step()[0] == [("a", 0, 40)]
    # b, c, d wait for what a computes; the unrelated one goes ahead.
    assert bench.step()[0] == [("a", 40, 25), ("other", 0, 10)]
    assert bench.step()[0] == [("other", 10, 1), ("a", 65, 1), ("b", 64, 1), ("c", 64, 1), ("d", 64, 1)]
    assert bench.scheduler.computed_tokens == 40 + 35 + 5


def test_a_large_burst_is_admitted_in_one_step_once_its_prefix_is_there() -> None:
    bench = Bench(blocks=400, budget=200, max_seqs=100)
    for i in range(3 * LOOKAHEAD):
        bench.add(str(i), [*range(64), 1000 + i])
    assert bench.step()[0] == [("0", 0, 65)]
    assert len(bench.step()[0]) == 3 * LOOKAHEAD


def test_when_the_leader_of_a_burst_goes_the_next_one_leads() -> None:
    bench = Bench(budget=40)
    leader, _ = [bench.add(name, [*range(64), ord(name)]) for name in "ab"]
    bench.step()
    bench.scheduler.remove(leader)
    assert bench.step()[0] == [("b", 32, 33)]


def test_blocks_of_a_failed_step_are_not_published() -> None:
    bench = Bench(budget=16)
    bench.add("bad", list(range(40)))
    bench.step()
    assert bench.step(bad="NaN")[1] == [Delta("bad", [], "error", "NaN", 40, 0)]
    assert (bench.scheduler.pool.cached, bench.scheduler.pool.used) == (1, 0)
    bench.add("next", list(range(40)))
    assert bench.step()[0] == [("next", 16, 16)]


def test_admission_leaves_a_spare_block_to_those_that_run() -> None:
    bench = Bench(blocks=2, prefix_cache=False)
    first = bench.add("first", 16)
    bench.add("second", 16)
    bench.step()
    assert (bench.running(), bench.scheduler.pool.free) == (["first"], 1)
    bench.scheduler.remove(first)
    bench.step()
    assert bench.running() == ["second"]


def preempted() -> tuple[Bench, Sequence, Sequence]:
    """Both need a third block in this step; there are five. A small one waits."""
    bench = Bench(blocks=5, max_seqs=2, prefix_cache=False)
    first, second = bench.add("first", 16), bench.add("second", 16)
    bench.add("small", 1)
    bench.steps(17)
    assert (len(first.blocks), len(second.blocks), bench.scheduler.preemptions) == (2, 2, 0)
    assert bench.step()[0] == [("first", 32, 1)]
    return bench, first, second


def test_the_latest_is_preempted_keeps_its_place_and_replays_everything() -> None:
    bench, first, second = preempted()
    assert (bench.running(), bench.scheduler.preemptions) == (["first"], 1)
    assert (second.computed, len(second.blocks), second.cached_tokens) == (0, 0, 0)
    bench.scheduler.remove(first)
    assert bench.step()[0] == [("second", 0, 33), ("small", 0, 1)]


def test_nothing_is_admitted_in_a_step_that_preempted() -> None:
    bench, _, _ = preempted()
    assert (bench.waiting(), bench.scheduler.pool.free) == (["second", "small"], 2)
    assert bench.step()[0] == [("first", 33, 1), ("small", 0, 1)]


def test_a_preempted_sequence_resumes_from_the_cache() -> None:
    bench = Bench(blocks=5)
    first, second = bench.add("first", 16), bench.add("second", 16)
    while not bench.scheduler.preemptions:
        bench.step()
    known = len(second.tokens)
    bench.scheduler.remove(first)
    assert bench.step()[0] == [("second", (known - 1) // 16 * 16, known - (known - 1) // 16 * 16)]
    assert second.cached_tokens == 0, "what it computed itself is no cache hit of its prompt"


def test_a_waiting_giant_is_passed_a_bounded_number_of_times() -> None:
    bench = Bench(blocks=10, max_seqs=8, prefix_cache=False)
    holder = bench.add("holder", 16)
    bench.step()
    giant = bench.add("giant", 16 * 9)
    passed = 0
    for i in range(2 * MAX_OVERTAKES):
        bench.add(f"small{i}", 2, max_tokens=1)
        passed += any(name.startswith("small") for name, _, _ in bench.step()[0])
    assert passed == MAX_OVERTAKES == giant.overtaken
    bench.scheduler.remove(holder)
    bench.step()
    assert bench.running()[0] == "giant"
    assert giant.overtaken == 0


@pytest.mark.parametrize("blocks", [3, 4, 7])
def test_the_first_always_gets_through_however_small_the_pool(blocks: int) -> None:
    bench = Bench(blocks=blocks, prefix_cache=True)
    for i in range(5):
        bench.add(str(i), 5 + i, max_tokens=48 - 5 - i)
    ended: list[str] = []
    for _ in range(2000):
        ended += [d.request_id for d in bench.step()[1] if d.finish_reason]
    assert sorted(ended) == list("01234")
    pool = bench.scheduler.pool
    assert (pool.used, pool.free + pool.cached) == (0, blocks)


def test_patient_sequences_have_what_others_leave() -> None:
    """Alone they take everything, as far as steps of theirs aren't limited; beside another one, what `leeway` says."""
    bench = Bench(budget=128)
    for name in ("p0", "p1", "p2"):
        bench.add(name, 10, patient=True)
    assert [item[0] for item in bench.step()[0]] == ["p0", "p1", "p2"]
    bench.scheduler.limit_step(128, 2)
    assert [item[0] for item in bench.step()[0]] == ["p0", "p1"]
    bench.scheduler.limit_step(128, 0)
    assert bench.step()[0] == []
    bench.add("usual", 10, max_tokens=20)
    for room, patient in ((0, 0), (2, 2), (9, 3)):
        bench.leeway.room = room
        names = [item[0] for item in bench.step()[0]]
        assert "usual" in names and len(names) == 1 + patient
    assert bench.leeway.asked == [[10], [1], [1]]


def test_a_patient_prompt_goes_on_in_small_pieces_beside_others() -> None:
    bench = Bench(budget=512, blocks=256)
    bench.add("usual", 10, max_tokens=1000)
    bench.step()
    bench.add("p", 300, patient=True)
    work = [item for _ in range(6) for item in bench.step()[0] if item[0] == "p"]
    assert [(start, count) for _, start, count in work[:5]] == [(64 * i, min(64, 300 - 64 * i)) for i in range(5)]


def test_another_takes_a_patient_ones_row_and_blocks() -> None:
    bench = Bench(max_seqs=2, blocks=12)
    for name in ("p0", "p1"):
        bench.add(name, 50, patient=True)
        bench.step()
    assert bench.running() == ["p0", "p1"]
    bench.leeway.room = 0
    bench.add("a", 20)
    assert [item[0] for item in bench.step()[0]] == ["a"]
    assert (bench.running(), bench.waiting()) == (["p0", "a"], ["p1"])
    bench.add("b", 120)
    assert [item[0] for item in bench.step()[0]] == ["a", "b"]
    assert (bench.running(), sorted(bench.waiting())) == (["a", "b"], ["p0", "p1"])


def test_a_patient_one_in_flight_is_waited_for() -> None:
    """Planned ahead: its row is free only when the step under way is committed."""
    bench = Bench(max_seqs=1)
    bench.add("p", 10, patient=True)
    work = bench.scheduler.schedule()
    bench.add("a", 10)
    assert bench.scheduler.schedule() == [] and bench.running() == ["p"]
    bench.scheduler.commit(work, [Outcome(1)])
    assert [item[0] for item in bench.step()[0]] == ["a"] and bench.waiting() == ["p"]


def test_others_wait_for_no_block_that_a_patient_one_is_to_compute() -> None:
    bench, prompt = Bench(budget=64), [7 * i for i in range(64)]
    bench.add("p", prompt, patient=True)
    bench.add("usual", 1)
    bench.step()
    bench.add("same", prompt)
    assert "same" in [item[0] for item in bench.step()[0]]


def test_among_growing_ones_the_patient_give_way_first() -> None:
    bench = Bench(blocks=4, budget=64)
    for name, patient in (("a", False), ("p", True), ("b", False)):
        bench.add(name, 15, patient=patient)
    bench.step()
    bench.steps(3)
    assert "p" in bench.waiting() and "a" in bench.running()
