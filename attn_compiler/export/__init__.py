"""Exported programs, rewritten by the same passes as Dynamo's graphs. Their AOTInductor packages run without this package.

A saved program with our Triton kernels is loaded where this module is imported: it defines their ops.
"""

from __future__ import annotations

from attn_compiler.export.rewriting import rewrite

__all__ = ["rewrite"]
