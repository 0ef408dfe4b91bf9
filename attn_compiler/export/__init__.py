"""Exported programs: rewritten by the same passes as Dynamo's graphs, with PyTorch's own ops alone, so that they run without this package."""

from __future__ import annotations

from attn_compiler.export.rewriting import rewrite

__all__ = ["rewrite"]
