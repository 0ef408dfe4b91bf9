"""The one attention of a function, matched in the mirror of the graph that Dynamo captures of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from attn_compiler.passes.graph.mirror import Mirror
from attn_compiler.passes.graph.site import Match
from attn_compiler.passes.matching.patterns import PATTERNS
from tests.passes.compiling import mirror_of


def matched(function: Callable[..., Any], *args: Any, dynamic: bool | None = None) -> tuple[Mirror, Match]:
    mirror = mirror_of(function, *args, dynamic=dynamic)
    found = [p.match(mirror, node) for node in mirror.graph.nodes for p in PATTERNS if node.target in p.anchors]
    (match,) = found
    return mirror, match
