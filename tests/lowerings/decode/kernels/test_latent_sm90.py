"""What the kernel over a latent for Hopper computes, and who waits for whom, as Python in PyTorch."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")

from attn_compiler.lowerings.decode.kernels import latent_sm90
from attn_compiler.lowerings.decode.kernels.latent_sm90_tuples import HopperSwitches
from tests.lowerings.shared.kernels import gluon_in_torch

_ROWS, _SCALE = 64, 0.05


@dataclass(frozen=True, kw_only=True)
class Latent:
    """bounds: (first key, one after the last) of each batch row. What is outside is NaN."""

    heads: int = 16
    keys: int = 200
    rank: int = 64
    rope: int = 16
    splits: int = 1
    bounds: tuple[tuple[int, int], ...] | None = None
    stages: int = 2
    means: bool = False


_CASES = {
    "one_block": Latent(),
    "splits": Latent(heads=70, keys=500, splits=3),
    "bounds": Latent(heads=70, keys=500, bounds=((3, 490), (100, 101))),
    "bounds_splits": Latent(keys=300, splits=3, bounds=((70, 133), (0, 900))),
    "nothing": Latent(bounds=((5, 5), (200, 400))),
    "nothing_splits": Latent(splits=3, bounds=((5, 5), (-7, 3))),
    "three_stages": Latent(keys=500, stages=3),
    "one_tile": Latent(keys=64),
    "mean": Latent(heads=70, bounds=((5, 5), (20, 150)), means=True),
    "mean_splits": Latent(keys=300, splits=3, bounds=((3, 2), (0, 900)), means=True),
}


def _exact(q: Tensor, latent: Tensor, rope: Tensor, bounds: Tensor | None, means: bool) -> tuple[Tensor, Tensor]:
    keys = torch.cat([latent, rope], -1).double()
    scores = q[:, :, 0].double() @ keys.mT * _SCALE
    if bounds is not None:
        at = torch.arange(keys.shape[1])
        allowed = (at >= bounds[0]) & (at < bounds[1])
        scores = scores.masked_fill(~allowed[:, None], float("-inf"))
        scores = torch.where(allowed.any(1)[:, None, None] | (not means), scores, 0.0)
    lse = scores.logsumexp(-1)
    weights = torch.exp(scores - torch.where(lse.isinf(), 0.0, lse)[..., None])
    return weights @ latent.double(), lse


def _run(case: Latent) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """out and lse, and what they should be."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, case.heads, 1, case.rank + case.rope), (2, case.keys, case.rank), (2, case.keys, case.rope))
    q, latent, rope = (torch.randn(shape, generator=generator).bfloat16() for shape in shapes)
    bounds = None if case.bounds is None else torch.tensor(case.bounds, dtype=torch.int32).T[..., None].contiguous()
    expected = _exact(q, latent, rope, bounds, case.means)
    if bounds is not None:
        at = torch.arange(case.keys)
        outside = (at < bounds[0]) | (at >= bounds[1])
        outside &= ~outside.all(1, keepdim=True) | (not case.means)
        latent, rope = (x.masked_fill(outside[..., None], float("nan")) for x in (latent, rope))
    blocks = -(-case.heads // _ROWS)
    kept = _ROWS if blocks > 1 else case.heads
    count = 2 * blocks * case.splits * kept
    out, lse = torch.full((2, case.heads, case.rank), torch.nan), torch.full((2, case.heads), torch.nan)
    partial = torch.full((count * (case.rank + 1),), torch.nan) if case.splits > 1 else None
    how = HopperSwitches(
        GROUP=case.heads, SEQLEN_Q=1, KEPT=kept, MEANS="all" if case.means else None, HALF=case.rank // 2, ROPE=case.rope,
        STAGES=case.stages, REGISTERS=240,
    )  # fmt: skip
    given = {
        "Q": q, "C": latent, "R": rope, "Out": out, "Lse": lse, "Partial": partial, "Bounds": bounds,
        "stride_qb": q.stride(0), "stride_qr": q.stride(1), "stride_cb": latent.stride(0), "stride_cs": latent.stride(1),
        "stride_rb": rope.stride(0), "stride_rs": rope.stride(1),
        "bounds_side": 0 if bounds is None else bounds.stride(0), "bounds_b": 0 if bounds is None else bounds.stride(1),
        "lse_at": count * case.rank, "seqlen_kv": case.keys, "scale": _SCALE, "HOW": how,
    }  # fmt: skip
    gluon_in_torch.run(latent_sm90, "attention_latent_sm90", (blocks, case.splits, 2), given)
    if partial is not None:
        shape = (2, blocks, case.splits, kept)
        out, lse = _added(partial[: count * case.rank].view(*shape, -1), partial[count * case.rank :].view(shape))
        out, lse = out[:, : case.heads], lse[:, : case.heads]
    return out, lse, *expected


def _added(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Of partial results (B, blocks, splits, rows, dims) and their logarithms, of base 2."""
    peak = lse.amax(2, keepdim=True)
    weights = torch.exp2(lse - torch.where(peak.isinf(), 0.0, peak))
    total = weights.sum(2)
    # What a split without keys leaves is not read.
    found = torch.where(lse.isinf()[..., None], 0.0, out) * weights[..., None]
    summed = found.sum(2) / torch.where(total == 0, 1.0, total)[..., None]
    joined = (peak[:, :, 0] + total.log2()) * torch.log(torch.tensor(2.0))
    return summed.flatten(1, 2), torch.where(total == 0, -torch.inf, joined).flatten(1, 2)


@pytest.mark.parametrize("name", _CASES)
def test_as_defined(name: str) -> None:
    out, lse, right, right_lse = _run(_CASES[name])
    torch.testing.assert_close(out.double(), right, atol=4e-3, rtol=0)
    torch.testing.assert_close(lse.double(), right_lse, atol=1e-5, rtol=0)


def test_a_row_without_keys_is_0() -> None:
    case = dataclasses.replace(_CASES["nothing"], bounds=((5, 5), (7, 9)))
    out, lse, _, _ = _run(case)
    assert not out[0].any()
    assert (lse[0] == -torch.inf).all()
    assert out[1].any()
