"""Months and days as bills know them: UTC."""

import calendar
import time
from datetime import date, timedelta


def month_of(seconds: float) -> str:
    return time.strftime("%Y-%m", time.gmtime(seconds))


def day_of(seconds: float) -> str:
    return time.strftime("%Y-%m-%d", time.gmtime(seconds))


def month_of_day(day: str) -> str:
    return day[:7]


def seconds_left(seconds: float) -> float:
    """Until the month that holds `seconds` (Unix) is over."""
    now = time.gmtime(seconds)
    year, month = (now.tm_year + 1, 1) if now.tm_mon == 12 else (now.tm_year, now.tm_mon + 1)
    return calendar.timegm((year, month, 1, 0, 0, 0)) - seconds


def days_between(first: str, last: str) -> list[str]:
    """Both included. Raises ValueError for what is no day."""
    start, end = date.fromisoformat(first), date.fromisoformat(last)
    return [(start + timedelta(number)).isoformat() for number in range((end - start).days + 1)]
