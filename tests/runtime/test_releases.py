from dataclasses import replace
from typing import Any

from stoker.runtime.releases import (
    MOST_KEPT,
    Release,
    Told,
    before,
    current,
    history,
    named,
    readable_releases,
    release_of,
    seen,
    state_of,
    version_name,
)
from stoker.runtime.spec import FunctionSpec


def spec(name: str = "f", version: str = "1") -> FunctionSpec:
    return FunctionSpec(name=name, kind="python", version=version, entry="m:f")


def release(version: str, at: float = 0.0, **fields: object) -> Release:
    return Release(version, {"f": {"version": version}}, at, "me", **fields)  # type: ignore[arg-type]


def test_an_app_s_version_is_made_from_its_functions() -> None:
    assert version_name({"a.f": "1"}) == "1"
    two = version_name({"a.f": "1", "a.g": "2"})
    assert two == version_name({"a.g": "2", "a.f": "1"}) and len(two) == 12
    assert len({two, version_name({"f": "2", "g": "1"}), version_name({"f": "1", "h": "2"})}) == 3
    made = release_of([spec(), spec("g", "2")], 5.0, "me")
    assert made.version == two and made.versions == {"f": "1", "g": "2"}
    assert readable_releases({two: made.to_dict()}) == [made]


def test_the_current_version_is_what_is_deployed() -> None:
    one, two = release("1"), release("2")
    assert current([two, one], {"f": "1"}) is one
    assert current([two, one], {"f": "3"}) is None and current([one], {}) is None


def test_what_becomes_of_a_version() -> None:
    one = release("1")
    failing = {"f": {"version": "1", "serving": "0", "error": "no numpy"}}
    assert state_of(one, Told(), is_current=True) == "untried"
    assert state_of(one, Told({"f": "1"}), is_current=True) == "serving"
    assert state_of(one, Told({"f": "0"}, failing), is_current=True) == "failed"
    assert state_of(release("0"), Told({"f": "0"}, failing), is_current=False) == "serving"
    assert seen(one, Told({}, failing)).errors == {"f": "no numpy"}
    proven = seen(one, Told({"f": "1"}, failing))
    assert (proven.fate, proven.errors) == ("proven", {})
    assert seen(proven, Told({}, failing)).fate == "proven"
    assert state_of(proven, Told(), is_current=False) == "proven"


def test_a_router_has_nothing_to_start() -> None:
    router = Release("1", {"r": {"version": "1", "kind": "router"}}, 0.0, "me")
    assert state_of(router, Told(), is_current=True) == "serving"


class App:
    """Versions of an app as they come in force, one a second. `failing`: those that fail to start."""

    def __init__(self, *known: Release, failing: str = "") -> None:
        self.known = {release.version: release for release in known}
        self.now, self.failing = known[-1] if known else None, failing
        self.time = 100.0

    def deploy(self, *versions: str) -> None:
        for version in versions:
            self._change(release(version, self.time), back=False)

    def roll_back(self, version: str = "") -> str:
        """What is in force then, "" where there is nothing to go back to."""
        found = self.known.get(version) or before(readable_releases(self.records), self.now)
        if found:
            self._change(found, back=True)
        return found.version if found else ""

    @property
    def records(self) -> dict[str, dict[str, Any]]:
        return {version: release.to_dict() for version, release in self.known.items()}

    def _change(self, new: Release, *, back: bool) -> None:
        old = self.now
        if old and old.version in self.failing:
            old = replace(old, fates={"f": "failed"})
        new = old if old and old.version == new.version else new
        changed, dropped = history(readable_releases(self.records), old, new, self.time, back=back)
        kept = {name: record for name, record in {**self.records, **changed}.items() if name not in dropped}
        self.known = {release.version: release for release in readable_releases(kept)}
        self.now = self.known[new.version]
        self.time += 1


def test_a_rollback_goes_further_back_each_time_and_over_what_failed() -> None:
    app = App(failing="3")
    app.deploy("1", "2", "3", "4")
    assert [app.roll_back() for _ in range(3)] == ["2", "1", ""]


def test_a_rollback_never_goes_forward_to_what_was_gone_back_from() -> None:
    app = App()
    app.deploy("1", "2")
    assert app.roll_back() == "1"
    app.deploy("3")
    assert app.roll_back() == "1"
    app.deploy("3", "4", "5")
    assert app.roll_back("3") == "3"
    assert [app.roll_back() for _ in range(2)] == ["1", ""]


def test_a_rollback_to_a_named_version_that_was_gone_back_from_can_be_undone() -> None:
    app = App()
    app.deploy("1", "2")
    app.roll_back()
    app.deploy("3")
    assert app.roll_back("2") == "2"
    assert [app.roll_back() for _ in range(3)] == ["3", "1", ""]
    assert app.roll_back("1") == "1" and app.roll_back() == ""


def test_a_version_that_is_deployed_again_has_what_it_replaced_before_it() -> None:
    app = App()
    app.deploy("1", "2", "1", "1")
    assert [app.roll_back() for _ in range(2)] == ["2", ""]


def test_where_no_version_is_current_a_rollback_goes_to_the_one_that_was_so_last() -> None:
    app = App()
    app.deploy("1", "2", "3")
    assert [app.roll_back() for _ in range(2)] == ["2", "1"]
    app.now = None
    assert app.roll_back() == "1" and app.roll_back() == ""
    app.now = None
    app.deploy("4")
    assert app.roll_back() == "1"
    assert before([], None) is None


def test_versions_of_before_the_order_was_kept_have_that_of_their_deploys() -> None:
    app = App(release("1", 1), release("2", 2, fates={"f": "failed"}), release("3", 3), release("4", 4))
    assert [app.roll_back() for _ in range(3)] == ["3", "1", ""]
    app.deploy("5")
    assert app.roll_back() == "1"


def test_history_is_bounded_and_keeps_what_is_current_and_what_a_rollback_goes_to() -> None:
    old = release("old", 0.0)
    known = [release(str(i), float(i)) for i in range(MOST_KEPT, 0, -1)] + [old]
    changed, dropped = history(known, old, release("new", 99.0), 99.0)
    assert changed.keys() == {"old", "new"} and dropped == ["2", "1"]
    changed, dropped = history(known, known[0], release("new", 99.0), 99.0)
    assert dropped == ["1", "old"]
    broken = [str(i) for i in range(2, MOST_KEPT + 9)]
    app = App(failing=" ".join(broken))
    app.deploy("first", *broken)
    assert len(app.known) == MOST_KEPT and app.roll_back() == "first"


def test_what_was_deployed_before_is_the_same_version_with_its_past() -> None:
    known = [release("2", 2.0), release("1", 1.0, fates={"f": "proven"})]
    changed, dropped = history(known, known[0], release("1", 3.0), 3.0)
    assert (changed["1"]["deployed_at"], changed["1"]["fates"], dropped) == (3.0, {"f": "proven"}, [])


def test_a_version_is_named_by_its_beginning() -> None:
    releases = [release("abc"), release("abd"), release("ab")]
    assert [found.version for found in named(releases, "ab")] == ["ab"]
    assert [found.version for found in named(releases, "abd")] == ["abd"]
    assert len(named(releases, "a")) == 3 and named(releases, "x") == []
