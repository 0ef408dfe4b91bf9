"""Exported programs, rewritten by the same passes as Dynamo's graphs. What comes out has PyTorch's own ops alone: it runs without us."""

from __future__ import annotations

from attn_compiler.export.rewriting import rewrite

__all__ = ["rewrite"]
