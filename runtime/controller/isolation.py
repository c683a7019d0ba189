"""Decides although one function's part of the decision raises: that one stays as it is, all others go on."""

import logging
from collections.abc import Iterable
from dataclasses import replace

from stoker.runtime.controller.policy import decide
from stoker.runtime.controller.policy_state import Decision, Reason, View

log = logging.getLogger("stoker.controller")


class Isolation:
    """Functions that can't be decided are tried again, on their own, at every decision, with what was remembered of
    them gone: that, or another minute, may have been the trouble. The error of each is logged once."""

    def __init__(self) -> None:
        self._stuck: set[str] = set()
        self._told: dict[str, str] = {}

    def decide(self, view: View) -> Decision:
        """Raises what `decide` raises when that isn't one function's fault."""
        stuck = troubles(view, self._stuck & view.specs.keys())
        try:
            decision = decide(without(view, stuck))
        except Exception:
            stuck = troubles(view, view.specs)
            decision = decide(without(view, stuck))
        self._stuck = set(stuck)
        self._tell(view, stuck)
        return replace(decision, reasons={**decision.reasons, **{name: reason(why) for name, why in stuck.items()}})

    def _tell(self, view: View, stuck: dict[str, str]) -> None:
        for name, why in stuck.items():
            if self._told.get(name) != why:
                log.error("%s can't be scaled, and stays as it is: %s", name, why)
        self._told = {name: why for name, why in {**self._told, **stuck}.items() if name in view.specs}


def troubles(view: View, names: Iterable[str]) -> dict[str, str]:
    """Of the functions that can't be decided on their own, the error."""
    found = {}
    for name in names:
        try:
            decide(without(view, view.specs.keys() - {name}))
        except Exception as error:
            log.debug("%s", name, exc_info=True)
            found[name] = f"{type(error).__name__}: {error}"
    return found


def without(view: View, names: Iterable[str]) -> View:
    """The replicas of the functions with these `names` keep their places."""
    held = frozenset(names)
    specs = {name: spec for name, spec in view.specs.items() if name not in held}
    return replace(view, specs=specs, held=held) if held else view


def reason(why: str) -> Reason:
    return Reason("not_scaled", f"stoker failed to decide how many replicas it needs ({why}); see the controller's log")
