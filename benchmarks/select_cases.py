"""The grid of shapes that the choice of kernels is measured on: head dims, lengths, masks, and fewer heads of k and v."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from attn_compiler.spec.attention import AttentionSpec
from benchmarks.kernel_cases import Case

_TOKENS, _WIDTH = 16384, 2048
HEAD_DIMS = (128, 64, 256, 96)
SEQLENS = (8192, 2048, 512, 32768)
# Lengths that rows are not made from.
HELD_OUT_SEQLENS = (1024, 4096)
# Windows that models of such lengths have.
_WINDOWS = {512: 128, 1024: 256, 2048: 512, 4096: 1024, 8192: 1024, 32768: 4096}
# Where FlexAttention is asked too: it is traced and compiled for each shape, which takes longer than all the rest of a case.
_FLEX = (
    *("window_d128_s8192", "window_d64_s8192", "window_d256_s8192", "window_gqa_d128_s8192", "window_d128_s2048"),
    *("padded_d128_s2048", "padded_d64_s2048", "padded_causal_d128_s2048", "padded_causal_gqa_d128_s2048"),
    *("softcap_d128_s8192", "softcap_d64_s2048", "sinks_gqa_d64_s8192", "sinks_window_gqa_d64_s8192"),
    *("causal_d128_s8192", "causal_d64_s8192", "causal_gqa_d128_s2048", "full_d128_s8192", "full_d64_s2048"),
)


def _case(kind: str, *, seqlen: int, head_dim: int, grouped: bool = False, **further: Any) -> Case:
    """16k tokens of width 2048; at 32k tokens, of a quarter of that. grouped: four query heads read one of k and v."""
    batch = max(_TOKENS // seqlen, 1)
    heads = (_WIDTH if seqlen <= _TOKENS else _WIDTH // 4) // head_dim
    heads -= heads % 4 if grouped else 0
    name = f"{kind}{'_gqa' if grouped else ''}_d{head_dim}_s{seqlen}"
    return Case(
        name=name, batch=batch, heads_q=heads, heads_kv=heads // 4 if grouped else heads, seqlen=seqlen,
        head_dim=head_dim, head_dim_v=head_dim, peers=("flex",) if name in _FLEX else (), **further,
    )  # fmt: skip


def _sorts() -> Iterator[Iterator[Case]]:
    """Masks, and what the model's softmax has besides: Gemma 2, gpt-oss; last what rows are not made from."""
    two, causal = (128, 64), ("causal", "full")
    yield (
        _case(kind, seqlen=s, head_dim=d, causal=kind == "causal")
        for s in SEQLENS
        for kind in causal
        for d in HEAD_DIMS
    )
    grouped = [*((s, d) for s in SEQLENS for d in two), *((s, d) for s in (8192, 2048) for d in (256, 96))]
    full = (_case("full", seqlen=8192, head_dim=d, grouped=True, causal=False) for d in two)
    yield itertools.chain((_case("causal", seqlen=s, head_dim=d, grouped=True) for s, d in grouped), full)
    windows = [(s, d, False) for s in (8192, 2048, 32768) for d in HEAD_DIMS]
    windows += [(s, d, True) for s in (8192, 2048) for d in two]
    yield (_case("window", seqlen=s, head_dim=d, grouped=grouped, window=_WINDOWS[s]) for s, d, grouped in windows)
    padded: list[tuple[str, int, int, dict[str, Any]]] = [
        ("padded", s, d, {"padding": "right", "causal": False}) for s in (2048, 8192, 512) for d in HEAD_DIMS
    ]
    for s in (2048, 8192):
        padded += [("padded_causal", s, d, {"padding": "right"}) for d in two]
        padded += [("padded_causal", s, d, {"padding": "left", "grouped": True}) for d in two]
    yield (_case(kind, seqlen=s, head_dim=d, **further) for kind, s, d, further in padded)
    yield (
        _case("lengths_causal" if causal else "lengths", seqlen=s, head_dim=d, padding="lengths", causal=causal)
        for s in (2048, 8192) for causal in (False, True) for d in two
    )  # fmt: skip
    sinks: dict[str, Any] = {"head_dim": 64, "grouped": True, "sinks": True}
    yield (
        case for s in (8192, 2048) for case in (
            *(_case("softcap", seqlen=s, head_dim=d, softcap=50.0) for d in (256, 128, 64)),
            _case("sinks", seqlen=s, **sinks), _case("sinks_window", seqlen=s, window=128, **sinks),
        )
    )  # fmt: skip
    yield (
        case for s in reversed(HELD_OUT_SEQLENS) for case in (
            *(_case("causal", seqlen=s, head_dim=d, grouped=d == 128) for d in two),
            _case("window", seqlen=s, head_dim=128, window=_WINDOWS[s]),
            _case("full", seqlen=s, head_dim=64, causal=False),
            _case("padded_causal", seqlen=s, head_dim=128, padding="right"),
            _case("softcap", seqlen=s, head_dim=256, softcap=50.0),
        )
    )  # fmt: skip


def _ordered() -> Iterator[Case]:
    """The most telling first: a run that is cut off has some of everything."""
    sorts = [list(sort) for sort in _sorts()]
    places = ((place + 0.5) / len(sort) for sort in sorts for place in range(len(sort)))
    flat = (case for sort in sorts for case in sort)
    yield from (case for _, case in sorted(zip(places, flat, strict=True), key=lambda pair: pair[0]))


CASES: tuple[Case, ...] = tuple(_ordered())

_DROPPED: dict[str, Any] = {"padding": "right", "dropout_p": 0.1}
#: Models that train with dropout as they are configured: BERT and XLM-R, decoders, T5's encoder. No row of an order is made of them by
#: select_rows: a lowering's random numbers are its own.
DROPOUT_CASES: tuple[Case, ...] = (
    _case("dropout_padded", seqlen=512, head_dim=64, causal=False, **_DROPPED),
    _case("dropout_padded_causal", seqlen=2048, head_dim=128, **_DROPPED),
    _case("dropout_padded", seqlen=2048, head_dim=64, causal=False, **_DROPPED),
    _case("dropout_padded_causal", seqlen=1024, head_dim=64, **_DROPPED),
    _case("dropout_padded", seqlen=512, head_dim=128, causal=False, **_DROPPED),
    _case("dropout_padded_causal", seqlen=2048, head_dim=256, **_DROPPED),
    _case("dropout_table", seqlen=512, head_dim=64, causal=False, table=True, dropout_p=0.1),
)
#: what names of theirs begin with
DROPOUT = "dropout"
BY_NAME = {case.name: case for case in CASES}


def spec_of(case: Case, *, training: bool) -> AttentionSpec:
    """What a model of that kind gives on a GPU, in bfloat16. Needs no GPU."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    from benchmarks import kernel_cases

    with FakeTensorMode():
        q, k, v = (
            torch.empty(case.batch, case.seqlen, heads, width, dtype=torch.bfloat16, device="cuda").transpose(1, 2)
            for heads, width in (
                (case.heads_q, case.head_dim),
                (case.heads_kv, case.head_dim),
                (case.heads_kv, case.head_dim_v),
            )
        )
    return kernel_cases.spec_of(case, q, k, v, training=training)
