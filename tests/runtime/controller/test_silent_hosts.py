from stoker.runtime.controller.silent_hosts import SPARED_S, silent_since, spared

WANTED = {"h0": {"f-1": {}}, "h1": {"f-2": {}, "g-1": {}}}


def test_what_a_silent_host_has_is_kept_for_a_while() -> None:
    since = silent_since(WANTED, {"h0"}, {}, 100.0)
    assert since == {"h1": 100.0}
    assert spared(WANTED, since, 100.0 + SPARED_S - 0.1) == {"h1": WANTED["h1"]}
    later = silent_since(WANTED, {"h0"}, since, 100.0 + SPARED_S)
    assert later == since and spared(WANTED, later, 100.0 + SPARED_S) == {}


def test_each_silence_counts_by_itself() -> None:
    since = silent_since(WANTED, {"h0"}, {}, 100.0)
    assert silent_since(WANTED, {"h0", "h1"}, since, 105.0) == {}
    assert silent_since(WANTED, {"h1"}, {}, 120.0) == {"h0": 120.0}
    assert silent_since({}, (), since, 130.0) == {}
