"""Rewrites that were done before: the passes' changes to a graph are kept, and repeated on the same graph, in this process or another.

key.py: the key of a graph, which holds all that passes read. record.py: the changes to it, as data. store.py: the files.
targets.py, arguments.py, values.py: functions, arguments and values as data. refusing.py: why a rewrite is not kept.
passes/rewrites/remembered.py: when a rewrite is looked up and kept.

A record can't be stale: whatever the passes read is in the key, or the graph has no key and the passes run. A record is data: nothing in
it is run, and the functions of its nodes are looked up in tables.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attn_compiler.options.options import Options
from attn_compiler.torch_private.store import Store


def here(options: Options, patches: Mapping[str, Any]) -> Store | None:
    """Return the store of rewrites; None where nothing is to be kept. patches: the user's settings of Inductor."""
    return Store.beside_inductors(patches) if options.cache_rewrites else None
