"""Context parallelism for users: `ContextParallel`, the option, which cuts batches and puts what comes out together."""

from __future__ import annotations

from attn_compiler.context_parallel.description import ContextParallel

__all__ = ["ContextParallel"]
