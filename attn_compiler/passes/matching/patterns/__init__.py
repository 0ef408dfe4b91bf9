"""Patterns of attention. To add one: a file with NAME, ANCHORS and match(), a line in PATTERNS, and a test."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import fx

from attn_compiler.passes.graph.mirror import Mirror
from attn_compiler.passes.graph.site import Match
from attn_compiler.passes.matching.patterns import lse_call, sdpa_call, sdpa_kernel_call, softmax_chain


@dataclass(frozen=True, kw_only=True, slots=True)
class Pattern:
    """anchors: the ATen ops that start the pattern. match: anchor -> Match, or raises Refused with the place where it stopped."""

    name: str
    anchors: frozenset[object]
    match: Callable[[Mirror, fx.Node], Match]


PATTERNS: tuple[Pattern, ...] = (
    Pattern(name=sdpa_call.NAME, anchors=sdpa_call.ANCHORS, match=sdpa_call.match),
    Pattern(name=sdpa_kernel_call.NAME, anchors=sdpa_kernel_call.ANCHORS, match=sdpa_kernel_call.match),
    Pattern(name=lse_call.NAME, anchors=lse_call.ANCHORS, match=lse_call.match),
    Pattern(name=softmax_chain.NAME, anchors=softmax_chain.ANCHORS, match=softmax_chain.match),
)
