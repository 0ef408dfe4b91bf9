"""Lowerings whose kernels did not compile with a torch or Triton that is newer than all that were tried (tried.py).

The first kernel of a lowering that is compiled there is its probe. If it fails, the lowering is refused as a whole, and that is kept
on disk. So a machine compiles a graph again only once. With releases that were tried, a failure concerns its own sites alone (failures.py).
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping
from typing import TYPE_CHECKING

from attn_compiler.reasons.codes import Code
from attn_compiler.reasons.decisions import Reason, refuse
from attn_compiler.spec import tried
from attn_compiler.spec.target import Target

if TYPE_CHECKING:
    from attn_compiler.torch_private.store import Store


def note(lowering: str, target: Target, cause: str) -> None:
    """Store that a kernel of a lowering did not compile, if that machine has a release that was not tried."""
    if tried.notices(target):
        known = {**_known(target), lowering: cause}
        store = _store()
        if store is not None:
            store.put(_key(target), known)
        _known.cache_clear()


def reasons(lowering: str, target: Target) -> list[Reason]:
    """Return why a lowering is not chosen on a machine."""
    said = tried.notices(target)
    cause = _known(target).get(lowering) if said else None
    if cause is None:
        return []
    remedy = "install a tried release, or delete attn_compiler/rewrites in Inductor's cache folder to try again"
    return refuse(Code.NOT_COMPILED, "; ".join(said), cause, remedy)


@functools.lru_cache(maxsize=16)
def _known(target: Target) -> Mapping[str, str]:
    """Return the causes by lowering."""
    store = _store()
    found = None if store is None else store.get(_key(target))
    return found if isinstance(found, dict) else {}


def _store() -> Store | None:
    # Late: these modules import Inductor.
    from attn_compiler.torch_private import inductor as torch_inductor
    from attn_compiler.torch_private.store import Store

    try:
        return Store(root=torch_inductor.cache_folder())
    except OSError:
        return None


def _key(target: Target) -> str:
    from attn_compiler.options import cache

    text = f"untried/{cache.sources_digest()}/{target.digest()}"
    return hashlib.sha256(text.encode()).hexdigest()
