"""The grid of shapes that the choice of kernels is measured on: head dims, lengths, masks, and fewer heads of k and v."""

from __future__ import annotations

import dataclasses
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
        name=name,
        batch=batch,
        heads_q=heads,
        heads_kv=heads // 4 if grouped else heads,
        seqlen=seqlen,
        head_dim=head_dim,
        head_dim_v=head_dim,
        peers=("flex",) if name in _FLEX else (),
        **further,
    )


def _plain() -> Iterator[Case]:
    for seqlen in SEQLENS:
        for kind in ("causal", "full"):
            yield from (_case(kind, seqlen=seqlen, head_dim=d, causal=kind == "causal") for d in HEAD_DIMS)


def _grouped() -> Iterator[Case]:
    for seqlen in SEQLENS:
        yield from (_case("causal", seqlen=seqlen, head_dim=d, grouped=True) for d in (128, 64))
    yield from (_case("causal", seqlen=s, head_dim=d, grouped=True) for s in (8192, 2048) for d in (256, 96))
    yield from (_case("full", seqlen=8192, head_dim=d, grouped=True, causal=False) for d in (128, 64))


def _windows() -> Iterator[Case]:
    for seqlen in (8192, 2048, 32768):
        for head_dim in HEAD_DIMS:
            yield _case("window", seqlen=seqlen, head_dim=head_dim, window=_WINDOWS[seqlen])
    yield from (
        _case("window", seqlen=s, head_dim=d, grouped=True, window=_WINDOWS[s]) for s in (8192, 2048) for d in (128, 64)
    )


def _padded() -> Iterator[Case]:
    for seqlen in (2048, 8192, 512):
        for head_dim in HEAD_DIMS:
            yield _case("padded", seqlen=seqlen, head_dim=head_dim, padding="right", causal=False)
    for seqlen in (2048, 8192):
        yield from (_case("padded_causal", seqlen=seqlen, head_dim=d, padding="right") for d in (128, 64))
        yield from (_case("padded_causal", seqlen=seqlen, head_dim=d, padding="left", grouped=True) for d in (128, 64))


def _lengths() -> Iterator[Case]:
    for seqlen in (2048, 8192):
        for kind in ("lengths", "lengths_causal"):
            causal = kind == "lengths_causal"
            yield from (_case(kind, seqlen=seqlen, head_dim=d, padding="lengths", causal=causal) for d in (128, 64))


def _scores() -> Iterator[Case]:
    """What the model's softmax has besides: Gemma 2, gpt-oss."""
    for seqlen in (8192, 2048):
        yield from (_case("softcap", seqlen=seqlen, head_dim=d, softcap=50.0) for d in (256, 128, 64))
        yield _case("sinks", seqlen=seqlen, head_dim=64, grouped=True, sinks=True)
        yield _case("sinks_window", seqlen=seqlen, head_dim=64, grouped=True, sinks=True, window=128)


def _held_out() -> Iterator[Case]:
    for seqlen in reversed(HELD_OUT_SEQLENS):
        yield from (_case("causal", seqlen=seqlen, head_dim=d, grouped=d == 128) for d in (128, 64))
        yield _case("window", seqlen=seqlen, head_dim=128, window=_WINDOWS[seqlen])
        yield _case("full", seqlen=seqlen, head_dim=64, causal=False)
        yield _case("padded_causal", seqlen=seqlen, head_dim=128, padding="right")
        yield _case("softcap", seqlen=seqlen, head_dim=256, softcap=50.0)


def _ordered() -> Iterator[Case]:
    """The most telling first: a run that is cut off has some of everything."""
    sorts = [list(sort()) for sort in (_plain, _grouped, _windows, _padded, _lengths, _scores, _held_out)]
    lengths = [len(sort) for sort in sorts]
    places = ((place + 0.5) / length for length in lengths for place in range(length))
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


def shortened(case: Case) -> Case:
    """The same for a look at the script."""
    return dataclasses.replace(case.small, peers=case.peers)
