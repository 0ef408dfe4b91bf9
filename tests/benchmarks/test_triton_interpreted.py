"""Tests in the interpreter of each release: how they are counted, and that every family with an interpreter has some, all right."""

from __future__ import annotations

import csv
from xml.etree import ElementTree

from attn_compiler.lowerings.shared.limits.triton_releases import COMPILED
from benchmarks import triton_interpreted
from benchmarks.triton_releases import RESULTS, ROOT

_REPORT = """<testsuites><testsuite>
<testcase name="a"/><testcase name="b"><failure/></testcase><testcase name="c"><skipped/></testcase><testcase name="d"/>
<testcase name="e"><error/></testcase>
</testsuite></testsuites>"""


def test_ends_are_counted() -> None:
    found = triton_interpreted.counted(ElementTree.fromstring(_REPORT))
    assert found == {"passed": 2, "failure": 1, "skipped": 1, "error": 1}


def test_each_family_but_those_in_gluon_has_tests() -> None:
    assert set(triton_interpreted.TESTS) == set(COMPILED) - {"hopper", "hopper_fp8", "decode_latent_sm90"}
    assert all((ROOT / path).is_file() for paths in triton_interpreted.TESTS.values() for path in paths)


def test_what_was_tried_was_right() -> None:
    """And of each family in some release."""
    with (RESULTS.parent / "triton_interpreted.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [each for each in rows if each["failed"] != "0"] == []
    assert {each["lowering"] for each in rows} <= set(triton_interpreted.TESTS)
    assert all(int(each["passed"]) > 10 for each in rows)
