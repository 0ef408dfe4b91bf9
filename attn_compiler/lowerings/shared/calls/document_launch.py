"""The launch of the kernel that numbers documents. Imports triton, so this module is imported late."""

from __future__ import annotations

from torch import Tensor

from attn_compiler.lowerings.shared.calls.leaf_calls import or_else
from attn_compiler.lowerings.shared.kernels.document_numbers import document_numbers
from attn_compiler.lowerings.shared.launching.launch import Arguments, launch
from attn_compiler.lowerings.shared.launching.on_device import on
from attn_compiler.lowerings.shared.launching.replaying import call_cache
from attn_compiler.lowerings.shared.ops.documents import empty_numbers, numbered

_NAME = "document_numbers"
#: positions of a program; positions that it reads at once
_BLOCK, _CHUNK = 512, 2048


def numbers(queries: Tensor, keys: Tensor | None) -> tuple[Tensor, Tensor]:
    """Compute the op as `documents.numbered` does, up to the numbers themselves."""
    return or_else(_NAME, _NAME, lambda: _by_kernel(queries, keys), lambda: numbered(queries, keys))


def _by_kernel(queries: Tensor, keys: Tensor | None) -> tuple[Tensor, Tensor]:
    given = {"queries": queries} if keys is None else {"queries": queries, "keys": keys}
    same = call_cache(_NAME, str(len(given)), list(given.values()))
    with on(same.device):
        of_queries, of_keys = empty_numbers(queries, keys)
        made = {"of_queries": of_queries, "of_keys": of_keys}
        launch(document_numbers, same, given | made, lambda: _arguments(queries, keys))
    return of_queries, of_keys


def _arguments(queries: Tensor, keys: Tensor | None) -> Arguments:
    of_keys = 0 if keys is None else keys.shape[1]
    return Arguments(
        grid=(-(-queries.shape[1] // _BLOCK) + -(-of_keys // _BLOCK), queries.shape[0], 1),
        tensors={
            "Queries": "queries",
            "Keys": None if keys is None else "keys",
            "NumbersQ": "of_queries",
            "NumbersK": None if keys is None else "of_keys",
        },
        numbers={
            "seqlen_q": queries.shape[1],
            "seqlen_kv": of_keys,
            "queries_b": queries.stride(0),
            "keys_b": 0 if keys is None else keys.stride(0),
            "BLOCK": _BLOCK,
            "CHUNK": _CHUNK,
        },
    )
