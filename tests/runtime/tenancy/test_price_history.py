from stoker.runtime.tenancy.price import Price
from stoker.runtime.tenancy.price_history import PriceHistory

LOW, HIGH = Price(request=1), Price(request=2)


def test_each_entry_has_the_price_of_its_period() -> None:
    history = PriceHistory().noted("5-0", LOW).noted("9-10", HIGH).noted("20-0", LOW)
    assert [history.at(id) for id in ("4-9", "5-0", "9-9", "9-10", "19-0", "100-0")] == [
        None,
        LOW,
        LOW,
        HIGH,
        HIGH,
        LOW,
    ]
    assert PriceHistory.from_list(history.to_list()) == history


def test_the_same_price_again_changes_nothing() -> None:
    history = PriceHistory().noted("5-0", LOW)
    assert history.noted("6-0", LOW) is history and history.noted("6-0", HIGH) is not history


def test_what_is_behind_is_all_that_is_kept() -> None:
    history = PriceHistory().noted("5-0", LOW).noted("9-0", HIGH).noted("20-0", LOW)
    assert history.behind("4-0") == history
    assert [first for first, _ in history.behind("9-0").periods] == ["9-0", "20-0"]
    assert [first for first, _ in history.behind("30-0").periods] == ["20-0"]
