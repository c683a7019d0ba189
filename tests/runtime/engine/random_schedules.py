"""Random schedules of requests for any engine: they arrive over time, some continue an earlier attempt, some are
aborted at some step; whatever happens around a request, its tokens are those of its lone run."""

import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from stoker.runtime.engine.engine import Engine
from stoker.runtime.engine.request import GenerationRequest, SamplingParams

LONGEST = 64
SHARED = [[3 + i * 11 % 90 for i in range(33)], [7 + i * 5 % 83 for i in range(20)]]
SAMPLINGS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"temperature": 1.2, "top_k": 7},
    {"temperature": 1.0, "top_p": 0.7},
    {"temperature": 1.5, "min_p": 0.1, "top_k": 20, "top_p": 0.9},
]

Tokens = Mapping[str, list[int]]


def catalogue() -> list[GenerationRequest]:
    """Prompts of 1 to 50 tokens, most with a shared beginning, greedy and sampled in every way."""
    rng = random.Random(11)
    made: list[GenerationRequest] = []
    for i in range(30):
        beginning = rng.choice([[], *SHARED, SHARED[0][:16]])
        prompt = beginning + [rng.randrange(97) for _ in range(rng.randint(1, 17))]
        params = SamplingParams(
            max_tokens=rng.randint((LONGEST - len(prompt)) // 2, LONGEST - len(prompt)),
            seed=rng.randrange(1000),
            ignore_eos=rng.random() < 0.7,
            stop_token_ids=tuple(rng.sample(range(97), 2)) if rng.random() < 0.2 else (),
            **rng.choice(SAMPLINGS),
        )
        made.append(GenerationRequest(str(i), prompt, params, cache_salt=rng.choice([b"", b"", b"tenant"])))
    return made


CATALOGUE = catalogue()


def random_options(rng: random.Random) -> dict[str, Any]:
    """Little room: of blocks, rows and tokens of a step."""
    max_seqs = rng.randint(1, 6)
    return {
        "max_model_len": LONGEST,
        "num_blocks": rng.randint(LONGEST // 16, 9),
        "max_seqs": max_seqs,
        "token_budget": rng.randint(max_seqs, 48),
        "prefix_cache": rng.random() < 0.8,
        "host_cache_bytes": rng.choice([0, 12 << 10, 200 << 10]),
        "async_scheduling": rng.choice(["off", "on", "on"]),
    }


def check_conservation(engine: Engine) -> None:
    pool = engine.pool
    ended = [item.sequence for item in engine.in_flight if item.sequence.ended]
    held = {block for s in (*engine.scheduler.running, *ended) for block in s.blocks}
    assert pool.free + pool.cached + pool.used == pool.total
    assert pool.used == len(held)
    assert not any(len(s.blocks) for s in engine.scheduler.waiting)


class Schedule:
    """One run through `engine`, which may have served others before. `lone`: each request's tokens by itself. Where
    arithmetic depends on the batch in its last bits, requests that `parted` from them are counted, not refused."""

    def __init__(self, engine: Engine, lone: Tokens, rng: random.Random, exact: bool = True) -> None:
        self.rng = rng
        self.lone = lone
        self.engine = engine
        self.coming = [self.attempt(request) for request in rng.sample(CATALOGUE, rng.randint(4, 12))]
        self.got = {request.id: list(request.prior) for request in self.coming}
        self.over = {request.id for request in self.coming if len(request.prior) == request.params.max_tokens}
        self.ended: dict[str, str] = {}
        self.aborted: set[str] = set()
        self.exact = exact
        self.parted = 0

    def attempt(self, request: GenerationRequest) -> GenerationRequest:
        whole = self.lone[request.id]
        cut = self.rng.randint(0, len(whole)) if self.rng.random() < 0.3 else 0
        return replace(request, prior=whole[:cut], patient=self.rng.random() < 0.4)

    def run(self, aborts: float) -> None:
        while self.coming or self.engine.has_work():
            while self.coming and self.rng.random() < 0.4:
                self.engine.submit(self.coming.pop())
            running = [name for name in self.got if name not in self.ended]
            if running and self.rng.random() < aborts:
                self.abort(self.rng.choice(running))
            self.step()
        self.check()

    def abort(self, name: str) -> None:
        self.coming = [request for request in self.coming if request.id != name]
        self.engine.abort(name)
        self.aborted.add(name)

    def step(self) -> None:
        for delta in self.engine.step():
            assert delta.request_id not in self.ended, "something came after the end"
            assert delta.finish_reason != "error", delta
            self.got[delta.request_id] += delta.tokens
            if delta.finish_reason:
                self.ended[delta.request_id] = delta.finish_reason
        check_conservation(self.engine)

    def check(self) -> None:
        for name, tokens in self.got.items():
            whole = self.lone[name]
            equal = tokens == (whole[: len(tokens)] if name in self.aborted else whole)
            assert equal or not self.exact, name
            self.parted += not equal
        # What has its last token when it comes ends as it comes: an abort is too late.
        assert all(self.ended.get(name, "abort") == "abort" for name in self.aborted - self.over)
        assert self.engine.stats()["used_blocks"] == 0
        assert not self.engine.has_work()


def abort_at_every_step(make: Callable[..., Engine], lone: Tokens) -> None:
    """One request of five is aborted, in each run one step later, until it ends by itself."""
    names = [request.id for request in CATALOGUE if len(lone[request.id]) > 8][:5]
    victim, others = names[0], names[1:]
    for moment in range(200):
        engine = make(max_model_len=LONGEST, num_blocks=8, max_seqs=4, token_budget=16, async_scheduling="on")
        got = run_until_done(engine, names, victim, moment)
        assert {name: got[name] for name in others} == {name: lone[name] for name in others}
        assert got[victim] == lone[victim][: len(got[victim])]
        if len(got[victim]) == len(lone[victim]):
            return
    raise AssertionError("the victim never finished by itself")


def run_until_done(engine: Engine, names: list[str], victim: str, moment: int) -> dict[str, list[int]]:
    for name in names:
        engine.submit(CATALOGUE[int(name)])
    got: dict[str, list[int]] = {name: [] for name in names}
    for steps in range(10_000):
        if steps == moment:
            engine.abort(victim)
        for delta in engine.step() if engine.has_work() else []:
            got[delta.request_id] += delta.tokens
        check_conservation(engine)
        if steps >= moment and not engine.has_work():
            break
    return got
