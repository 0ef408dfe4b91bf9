"""What the default run leaves to CI: each value of each parameter still runs, and nothing is left to nobody."""

from __future__ import annotations

import pytest

from tests.thinned import firsts, further, in_full

_INNER = """
import pytest
from tests.thinned import mark_turns

@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    mark_turns(items)
"""
_TESTS = """
import pytest

@pytest.mark.in_turns
@pytest.mark.parametrize("few", ["x", "y"])
@pytest.mark.parametrize(("many", "same"), [(1, 0), (2, 0), pytest.param(3, 0, id="three"), (300, 0)])
def test_crossed(few, many, same): pass

@pytest.mark.in_turns(2)
@pytest.mark.parametrize("one", range(5))
def test_one(one): pass

@pytest.mark.in_turns(3)
@pytest.mark.parametrize("few", [True, False])
@pytest.mark.parametrize("many", list(range(9)))
def test_both(few, many): pass
"""
_DAILY = {
    "test_crossed[1-0-x]",
    "test_crossed[2-0-y]",
    "test_crossed[three-x]",
    "test_crossed[300-0-y]",
    "test_one[0]",
    "test_one[2]",
    "test_one[4]",
    "test_both[0-True]",
    "test_both[3-False]",
    "test_both[6-True]",
}


def _passed(pytester: pytest.Pytester, expression: str) -> set[str]:
    found = pytester.inline_run("-m", expression, "-p", "no:cacheprovider").listoutcomes()[0]
    return {report.nodeid.partition("::")[2] for report in found}


@pytest.fixture
def tests(pytester: pytest.Pytester) -> pytest.Pytester:
    pytester.makeconftest(_INNER)
    pytester.makepyfile(_TESTS)
    pytester.makeini("[pytest]\nmarkers =\n    in_turns\n    further\n")
    return pytester


def test_each_value_runs_by_default(tests: pytest.Pytester) -> None:
    assert _passed(tests, "not further") == _DAILY


def test_all_others_are_ci_s(tests: pytest.Pytester) -> None:
    others = _passed(tests, "further")
    assert not others & _DAILY
    assert len(others | _DAILY) == 2 * 4 + 5 + 2 * 9


def test_the_first_of_each_kind_is_told_by_each_way_of_telling() -> None:
    assert firsts([1, 3, 4, 6, 8], lambda x: x % 2, lambda x: x > 5) == [1, 4, 1, 6]


@pytest.mark.parametrize(("thin", "mark"), [(further, "further"), (in_full, "slow")])
def test_what_is_not_daily_is_marked(thin: type, mark: str) -> None:
    first, second = thin([1, 2], daily=[1])  # type: ignore[call-arg,misc]
    assert first == 1
    assert second.values == (2,)
    assert [x.name for x in second.marks] == [mark]


def test_a_fixture_makes_what_the_tests_that_use_it_ask_for(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("""
        import pytest
        from tests.thinned import asked_for

        @pytest.fixture(scope="module")
        def made(request):
            return asked_for(request, "name")

        @pytest.mark.parametrize("name", ["a", "b"])
        def test_uses(made, name):
            assert made == ["a", "b"]

        @pytest.mark.parametrize("name", ["c"])
        def test_has_the_same_parameter(name):
            pass
    """)
    pytester.runpytest_inprocess("-p", "no:cacheprovider").assert_outcomes(passed=3)
