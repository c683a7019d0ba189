import calendar

import pytest

from stoker.runtime.tenancy.billing_days import day_of, days_between, month_of, seconds_left

NEW_YEAR = calendar.timegm((2027, 1, 1, 0, 0, 0))


def test_months_end_at_midnight_utc() -> None:
    assert (month_of(NEW_YEAR - 1), month_of(NEW_YEAR)) == ("2026-12", "2027-01")
    assert (seconds_left(NEW_YEAR - 1), seconds_left(NEW_YEAR)) == (1, 31 * 86_400)
    assert day_of(NEW_YEAR - 1) == "2026-12-31"


def test_days_between_are_all_of_them() -> None:
    assert days_between("2028-02-28", "2028-03-01") == ["2028-02-28", "2028-02-29", "2028-03-01"]
    assert days_between("2028-02-28", "2028-02-27") == []
    with pytest.raises(ValueError):
        days_between("2027-02-29", "2027-03-01")
