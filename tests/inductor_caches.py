"""Inductor's caches, as tests want them."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

from torch._functorch._aot_autograd.autograd_cache import AOTAutogradCache
from torch._inductor.codecache import FxGraphCache


@contextlib.contextmanager
def no_graphs() -> Iterator[None]:
    """Inside, Inductor and AOTAutograd know no graph. C++ that Inductor wrote before, in an earlier run, too, is compiled already."""
    with contextlib.ExitStack() as stack:
        room = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        for cache in (FxGraphCache, AOTAutogradCache):
            place = str(room / cache.__name__)
            stack.enter_context(mock.patch.object(cache, "_get_tmp_dir", lambda place=place: place))
        yield
