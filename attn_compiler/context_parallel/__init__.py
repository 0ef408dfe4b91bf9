"""Context parallelism for users: the option `ContextParallel`, which cuts batches and puts results together."""

from __future__ import annotations

from attn_compiler.context_parallel.description import ContextParallel

__all__ = ["ContextParallel"]
