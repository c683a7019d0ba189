"""Where a device's time goes: whatever happens, every nanosecond is counted once, and charged once."""

from hypothesis import given
from hypothesis import strategies as st

from stoker.runtime.pool.books import Books
from stoker.runtime.pool.meter import Spent

SECOND = 10**9
NAMES = "abcd"


class Clock:
    def __init__(self) -> None:
        self.now = 5 * SECOND

    def __call__(self) -> int:
        return self.now


NAME = st.sampled_from(NAMES)
EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("pass"), st.integers(0, SECOND)),
        st.tuples(st.just("begin"), st.sampled_from(["swap", "load"])),
        st.tuples(st.just("end"), st.sampled_from(["swap", "load"])),
        st.tuples(st.just("wait"), st.booleans()),
        st.tuples(st.just("open"), NAME),
        st.tuples(st.just("step"), st.lists(st.tuples(NAME, st.floats(0.1, 9), st.booleans()), max_size=4)),
        st.tuples(st.just("end request"), NAME),
    ),
    max_size=60,
)


@given(EVENTS, st.integers(0, SECOND))
def test_every_nanosecond_is_counted_once_and_charged_once(events: list[tuple[str, object]], late: int) -> None:
    """`late`: steps overlap each other and what came before them."""
    clock = Clock()
    books = Books(clock)
    told = 0
    under_way = {"swap": 0, "load": 0}
    for kind, value in events:
        match kind, value:
            case "pass", int(time):
                clock.now += time
            case "begin", str(what):
                under_way[what] += 1
                books.meter.begin(what)  # type: ignore[arg-type]
            case "end", str(what) if under_way[what]:
                under_way[what] -= 1
                books.meter.end(what)  # type: ignore[arg-type]
            case "wait", bool(over):
                books.wait_for_swap("m", over)
            case "open", str(name):
                books.open("m", name, f"tenant {name}")
            case "step", list(parts):
                books.book("m", [Spent(parts, max(0, clock.now - late), clock.now)])
            case "end request", str(name):
                told += sum(books.charged("m", name, ended=True))
    books.close("m")
    report = books.report()
    assert abs(report["busy"] + report["swap"] + report["load"] + report["idle"] - report["wall"]) <= 4
    assert report["wall"] == (clock.now - books.meter.began_ns) // 1000
    computed = report["busy"] - report["wasted"]
    assert computed - 60 <= report["charged"] <= computed + report["swap"] + 60
    assert told <= report["charged"] + 1 and report["open"] == 0


def test_a_step_is_split_by_the_work() -> None:
    clock = Clock()
    books = Books(clock)
    for name in "ab":
        books.open("m", name, name)
    clock.now += 4 * SECOND
    books.book(
        "m", [Spent([("a", 3.0, True), ("b", 1.0, False), ("gone", 4.0, False)], clock.now - 4 * SECOND, clock.now)]
    )
    assert books.charged("m", "a", ended=False) == (1_500_000, 0, 0)
    assert books.charged("m", "b", ended=False) == (0, 500_000, 0)
    assert books.report()["wasted"] == 2_000_000
    assert books.shares.level("a") == 1.5


def test_a_swap_that_others_hide_costs_those_who_wait_only_what_is_seen_of_it() -> None:
    clock = Clock()
    books = Books(clock)
    books.open("here", "runs", "one")
    books.open("away", "waits", "two")
    books.wait_for_swap("away")
    books.meter.begin("swap")
    begin = clock.now
    clock.now += 3 * SECOND
    books.book("here", [Spent([("runs", 1.0, True)], begin, clock.now)])
    clock.now += SECOND
    books.wait_for_swap("away", over=True)
    books.meter.end("swap")
    clock.now += SECOND
    assert books.charged("here", "runs", ended=False) == (3_000_000, 0, 0)
    assert books.charged("away", "waits", ended=False) == (0, 0, 1_000_000)
    assert books.report() == {
        "busy": 3_000_000, "swap": 1_000_000, "load": 0, "idle": 1_000_000, "charged": 0, "wasted": 0,
        "open": 4_000_000, "wall": 5_000_000,
    }  # fmt: skip
