from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

import attn_compiler
from attn_compiler.reporting import verifications as results
from attn_compiler.reporting.verifications import KEPT_VERIFICATIONS, Verification, keep

MASK = Verification(graph="0/0", module="layers.0", subject="mask", formula="k <= q", elements=36)
OUTPUT = Verification(graph="0/0", module="layers.0", subject="output", elements=384, error=2e-7, allowed=6e-6)
SKIPPED = Verification(graph="0/0", module="layers.1", subject="output", skipped="dropout")


@pytest.fixture(autouse=True)
def _empty() -> Iterator[None]:
    results.forget()
    yield
    results.forget()


def test_kept_in_order() -> None:
    keep([MASK, OUTPUT])
    keep([SKIPPED])
    assert attn_compiler.verifications() == (MASK, OUTPUT, SKIPPED)


def test_checks_are_printed_a_line_each() -> None:
    assert str(attn_compiler.verifications()).startswith("nothing was verified")
    keep([MASK, SKIPPED])
    assert str(attn_compiler.verifications()).splitlines() == [str(MASK), str(SKIPPED)]


def test_reset_forgets() -> None:
    keep([MASK])
    attn_compiler.reset()
    assert attn_compiler.verifications() == ()


def test_only_the_last_are_kept() -> None:
    keep([MASK])
    keep([OUTPUT] * KEPT_VERIFICATIONS)
    assert len(attn_compiler.verifications()) == KEPT_VERIFICATIONS
    assert MASK not in attn_compiler.verifications()


def test_what_is_skipped_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger=results.__name__):
        keep([MASK, SKIPPED])
    assert [(r.levelno, r.getMessage()) for r in caplog.records] == [
        (logging.INFO, "layers.0: mask (k <= q) verified on 36 elements"),
        (logging.WARNING, "layers.1: output not verified: dropout"),
    ]


def test_words_of_an_output() -> None:
    assert str(OUTPUT) == "layers.0: output verified on 384 elements, off by 2e-07 of 6e-06 allowed"
