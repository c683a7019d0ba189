"""What is said of a grammar that doesn't compile."""

import pytest

from stoker.runtime.grammar import GrammarRefused, gist, lark_grammar, regex_grammar, validate


@pytest.mark.parametrize(
    ("pattern", "why"),
    [("((", "unclosed group"), ("[", "unclosed character class"), ("*", "repetition operator missing expression")],
)
def test_a_pattern_s_error_says_what_is_wrong_with_it(pattern: str, why: str) -> None:
    with pytest.raises(GrammarRefused) as refused:
        validate(regex_grammar(pattern))
    said = str(refused.value)
    assert said.endswith(f"regex parse error: {why}") and repr(pattern).strip("'") in said and "\n" not in said


def test_other_errors_are_their_first_line() -> None:
    with pytest.raises(GrammarRefused, match=r'unknown name: "x"$'):
        validate(lark_grammar("start: x y"))
    assert gist("announced:\n  nothing told\n") == "announced:"
