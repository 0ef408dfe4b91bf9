"""Cases that an older release does not have: told with a reason, and only with that release."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator

import pytest

from tests.hf import older
from tests.hf.survey import FAMILY, SCENARIO, Case, why_absent


@pytest.fixture(autouse=True)
def _forget_release() -> Iterator[None]:
    older.major.cache_clear()
    yield
    older.major.cache_clear()


def _installed(monkeypatch: pytest.MonkeyPatch, release: str) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: release)


def test_what_is_absent_depends_on_the_release(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(family="t5", scenario="training", impl="sdpa", dtype="fp32")
    _installed(monkeypatch, "4.57.6")
    assert why_absent(case) == "transformers 4 has no SDPA implementation of T5"
    older.major.cache_clear()
    _installed(monkeypatch, "5.23.0")
    assert why_absent(case) is None


def test_an_implementation_may_be_absent_in_one_scenario(monkeypatch: pytest.MonkeyPatch) -> None:
    _installed(monkeypatch, "4.57.6")
    assert older.why_absent("bart", "padded", "eager") is not None
    assert older.why_absent("bart", "training", "eager") is None
    assert older.why_absent("bart", "padded", "sdpa") is None


def test_without_transformers_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    assert older.why_absent("t5", "training", "sdpa") is None


def test_every_line_names_a_family_and_what_it_has() -> None:
    for name, lines in older.TRANSFORMERS_4.items():
        family = FAMILY[name]
        for line, why in lines.items():
            words = line.split()
            assert words[-1] in (SCENARIO if len(words) == 2 else {*SCENARIO, *family.impls}), line
            assert words[0] in {*SCENARIO, *family.impls}, line
            assert len(why.split()) > 4
