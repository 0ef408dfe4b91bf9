"""Rewrites that were done before: what the passes made of a graph is kept, and done again to the same graph, in this process or another.

key.py: what a graph is told apart by, which is all that passes read. record.py: what was done to it, as data. store.py: the files.
targets.py, arguments.py, values.py: functions, arguments and values as data. refusing.py: why something is not kept.
passes/rewrites/remembered.py: when a rewrite is looked up and kept.

A record can't be stale: whatever the passes read is in the key, or the graph has no key and the passes run. A record is data: nothing in
it is run, and what its nodes call is looked up in tables.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attn_compiler.options.options import Options
from attn_compiler.torch_private.store import Store


def here(options: Options, patches: Mapping[str, Any]) -> Store | None:
    """Where rewrites are kept; None where nothing is to be kept. patches: what the user set for Inductor."""
    return Store.beside_inductors(patches) if options.cache_rewrites else None
