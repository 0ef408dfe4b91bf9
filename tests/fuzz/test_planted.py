"""Planted faults: all of them still apply, and some are found at once, made small and written as a test."""

from __future__ import annotations

import ast
import json
from collections import Counter

import pytest

from tests import fresh
from tests.fuzz.environment import variables
from tests.fuzz.planted import FAULTS, DoesNotApply, Fault, sharing
from tests.fuzz.planted.fault import PACKAGE, faults

#: the name of a fault -> the rule whose programs find it at once
QUICK = {"reference: no row term": "gradients", "a scale divides and multiplies alike": "anything"}

# In a process of its own for each: a fault is planted before the package is imported.
_FIND = """
import json, sys
from pathlib import Path
from tests.fuzz import crew, quick
limits = crew.Limits(processes=2, method="fork", renewed=1)
jobs = (quick.Find(name=name, rule=rule, folder=sys.argv[1]) for name, rule in json.loads(sys.argv[2]).items())
print(json.dumps({job.name: told for job, told in crew.events(jobs, limits) if isinstance(told, dict)}))
"""


@pytest.mark.parametrize("fault", [*FAULTS, *sharing.ALL], ids=[f.name for f in (*FAULTS, *sharing.ALL)])
def test_it_still_applies(fault: Fault) -> None:
    """Where this fails, the code was changed: bring the fault up to date, or take it out."""
    ast.parse(fault.source())
    assert fault.source() != (PACKAGE / fault.file).read_text()
    fault.place()


def test_names_are_different() -> None:
    assert len(FAULTS) >= 100
    assert max(Counter(f.name for f in (*FAULTS, *sharing.ALL)).values()) == 1


def test_a_fault_is_read_as_a_difference() -> None:
    first, second = faults("a\nb.py c; d e: f: g\n-     x,\n-     y\n+ z\n\nh\ni/j.py; k: l\n- m - n\n")
    assert first == Fault(name="a", file="b.py", within="c", old="    x,\n    y", new="z", rule="d e", why="f: g")
    assert second == Fault(name="h", file="i/j.py", within=None, old="m - n", new="", rule="k", why="l")


@pytest.mark.parametrize("text", ["a\nb.py c\n- x", "a\nb.py; d: e\n+ x", "a\nb.py; d: e\n- x\ny"])
def test_a_paragraph_that_is_no_fault_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="this is no planted fault"):
        faults(text)


def test_what_does_not_apply_is_named() -> None:
    gone = Fault(name="gone", file="spec/attention.py", within=None, old="no such line", new="", rule="", why="")
    with pytest.raises(DoesNotApply, match="'gone' changes 'no such line'"):
        gone.source()


@pytest.mark.further
def test_faults_are_found_made_small_and_written(tmp_path: object) -> None:
    done = fresh.run(_FIND, str(tmp_path), json.dumps(QUICK), environment=variables("cpu"))
    found = json.loads(done.stdout.splitlines()[-1])
    assert all(found[name]["same"] for name in QUICK), found
    # How small it gets is a matter of seconds: on a busy machine not as small as it could be.
    assert all(found[name]["lines"] <= 14 for name in QUICK), found
