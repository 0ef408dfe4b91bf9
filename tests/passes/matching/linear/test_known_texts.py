"""Texts that were read: each is named, and by a digest as source.py makes them."""

from __future__ import annotations

import re

from attn_compiler.passes.matching.linear.known_texts import READ


def test_each_is_a_digest_and_says_what_it_is() -> None:
    assert READ
    for digest, words in READ.items():
        assert re.fullmatch(r"[0-9a-f]{16}", digest)
        assert "transformers" in words
