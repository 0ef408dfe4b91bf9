"""Kernels compiled by each release of Triton, and interpreted."""

from __future__ import annotations

import collections
import csv
from typing import Any
from xml.etree import ElementTree

import pytest

from attn_compiler.lowerings.shared.limits.triton_releases import COMPILED
from benchmarks import triton_releases
from benchmarks.triton_releases import RESULTS, ROOT

pytest.importorskip("triton")


# Kernels by release of Triton.
def row(**other: str) -> dict[str, str]:
    usual = {"triton": "3.9.0", "case": "triton causal_64", "kernel": "attention_forward", "nth": "0"}
    return {**usual, "spilled": "16", "shared": "1024", **other}


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ({}, []),
        ({"spilled": "8", "shared": "512"}, []),
        ({"spilled": "24"}, ["spilled 16 became 24"]),
        ({"spilled": "24", "shared": "2048"}, ["spilled 16 became 24", "shared 1024 became 2048"]),
        ({"triton": "3.8.0"}, ["no such row was kept"]),
        ({"nth": "1"}, ["no such row was kept"]),
        ({"case": "triton causal_80"}, []),
    ],
)
def test_what_got_worse_is_named(found: dict[str, Any], said: list[str]) -> None:
    assert [line.partition(": ")[2] for line in triton_releases.worse([row()], [row(**found)])] == said


def test_a_release_that_a_family_is_known_with_has_rows_of_it() -> None:
    """And no other release has: the table of releases follows what was compiled."""
    version = {text: release for release, text in triton_releases.WHEELS.items()}
    found = collections.defaultdict(set)
    for each in triton_releases.kept():
        found[each["lowering"]].add(version[each["triton"]])
    assert {lowering: sorted(releases) for lowering, releases in found.items()} == {
        lowering: list(releases) for lowering, releases in COMPILED.items()
    }


def test_each_release_has_the_same_kernels() -> None:
    cases = collections.defaultdict(set)
    for each in triton_releases.kept():
        cases[each["triton"]].add((each["case"], each["kernel"], each["nth"]))
    assert set(cases) == set(triton_releases.WHEELS.values())
    assert len({frozenset(names) for names in cases.values()}) == 1


def test_the_section_is_of_known_cases_and_of_every_family() -> None:
    assert set(triton_releases.SECTION) <= set(triton_releases.cases())
    assert {triton_releases.lowering_of(case) for case in triton_releases.SECTION} == set(COMPILED)
    assert {triton_releases.lowering_of(case) for case in triton_releases.cases()} == set(COMPILED)
    assert set(triton_releases.SECTION) <= {each["case"] for each in triton_releases.kept()}


# Tests in the interpreter of each release.
_REPORT = """<testsuites><testsuite>
<testcase name="a"/><testcase name="b"><failure/></testcase><testcase name="c"><skipped/></testcase><testcase name="d"/>
<testcase name="e"><error/></testcase>
</testsuite></testsuites>"""


def test_ends_are_counted() -> None:
    found = triton_releases.counted(ElementTree.fromstring(_REPORT))
    assert found == {"passed": 2, "failure": 1, "skipped": 1, "error": 1}


def test_each_family_but_those_in_gluon_has_tests() -> None:
    assert set(triton_releases.TESTS) == set(COMPILED) - {"hopper", "hopper_fp8", "decode_latent_sm90"}
    assert all((ROOT / path).is_file() for paths in triton_releases.TESTS.values() for path in paths)


def test_what_was_tried_was_right() -> None:
    """And of each family in some release."""
    with (RESULTS.parent / "triton_interpreted.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [each for each in rows if each["failed"] != "0"] == []
    assert {each["lowering"] for each in rows} <= set(triton_releases.TESTS)
    assert all(int(each["passed"]) > 10 for each in rows)
