"""The lowering that does nothing: the site stays as the model wrote it."""

from __future__ import annotations

from torch import fx

from attn_compiler.lowerings.base import Anywhere, Emitter, Operands
from attn_compiler.reasons.decisions import Reason
from attn_compiler.spec.attention import AttentionSpec
from attn_compiler.spec.target import Target


class Untouched(Anywhere):
    """Last in every order: runs anywhere, refuses nothing, asks for nothing, and has nothing to emit."""

    name = "untouched"

    def cannot_package(self) -> list[Reason]:
        return []

    def why_not(self, spec: AttentionSpec, target: Target) -> list[Reason]:
        return []

    def emit(self, emitter: Emitter, spec: AttentionSpec, operands: Operands) -> fx.Node:
        raise TypeError("an untouched site keeps its nodes: it is left out of the rewrite, never emitted")
