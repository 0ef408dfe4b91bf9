"""Random operands for a proof: small sizes around chunk borders, the real length, the real heads, and three sorts of numbers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from attn_compiler.spec.linear import LinearSpec

#: usual numbers; tiny q and k, where the eps added to a norm counts, with long memory; numbers outside the usual range
SORTS = ("ordinary", "tiny", "unusual")
_SMALL = (4, 6)
#: head dims (k, v) of the run with all heads of the model
_SMALLEST = (2, 3)
#: heads of v for each head of k in most runs, at most
_GROUPED = 2
#: elements of the largest tensor of a proof
_MOST = 1 << 24


@dataclass(frozen=True, kw_only=True, slots=True)
class DrawSizes:
    """Sizes of one run. batch, length, heads_k, heads_v, dim_k, dim_v: as in LinearSpec. sort: of numbers."""

    batch: int
    length: int
    heads_k: int
    heads_v: int
    dim_k: int
    dim_v: int
    sort: str

    @property
    def words(self) -> str:
        """Description of the sizes for error messages."""
        return f"at {self.length} tokens, heads of {self.dim_k}/{self.dim_v}, {self.sort} numbers"


def sizes(spec: LinearSpec) -> Iterator[DrawSizes]:
    """Yield the sizes to run a function at, smallest first."""
    ratio = min(spec.num_heads_v // spec.num_heads_k, _GROUPED)

    def small(length: int, sort: str) -> DrawSizes:
        heads = {"heads_k": 2, "heads_v": 2 * ratio}
        return DrawSizes(batch=1, length=length, **heads, dim_k=_SMALL[0], dim_v=_SMALL[1], sort=sort)

    lengths = _lengths(spec)
    for sort in SORTS:
        yield from (small(length, sort) for length in lengths)
    if isinstance(spec.length, int) and spec.length not in lengths and not _is_one_token(spec):
        yield small(spec.length, SORTS[0])
    # A function's text may treat the tenth head, or groups of four, unlike the second head and groups of two.
    yield dataclasses.replace(
        small(lengths[min(1, len(lengths) - 1)], SORTS[0]),
        heads_k=spec.num_heads_k,
        heads_v=spec.num_heads_v,
        dim_k=_SMALLEST[0],
        dim_v=_SMALLEST[1],
    )
    yield _as_they_are(spec, ratio)


def _is_one_token(spec: LinearSpec) -> bool:
    """Return whether the function takes a single token only."""
    return spec.form.recurrence == "ssd" and spec.form.chunk == 1


def _lengths(spec: LinearSpec) -> tuple[int, ...]:
    chunk = spec.form.chunk
    if chunk == 1:
        return (1,) if _is_one_token(spec) else (1, 2, 5)
    return tuple(dict.fromkeys(n for n in (1, 2, chunk - 1, chunk, chunk + 1, 2 * chunk + 3) if n > 0))


def _as_they_are(spec: LinearSpec, ratio: int) -> DrawSizes:
    """Real batch, heads and head dims at few tokens; a batch of 1 and few heads if that would take long."""
    length = 1 if _is_one_token(spec) else spec.form.chunk + 1
    batch = spec.batch if isinstance(spec.batch, int) else 1
    # Functions may hold a number for each pair of tokens in a chunk and each channel.
    is_by_channel = spec.form.channel or spec.form.recurrence == "ssd"
    pairs = spec.form.chunk**2 * (spec.head_dim_k if is_by_channel else 1)
    one_head = 2 * max(pairs, spec.form.chunk * (spec.head_dim_k + spec.head_dim_v), spec.head_dim_k * spec.head_dim_v)
    fits = batch * spec.num_heads_v * one_head <= _MOST
    return DrawSizes(
        batch=batch if fits else 1,
        length=length,
        heads_k=spec.num_heads_k if fits else 1,
        heads_v=spec.num_heads_v if fits else ratio,
        dim_k=spec.head_dim_k,
        dim_v=spec.head_dim_v,
        sort=SORTS[0],
    )


def operands(spec: LinearSpec, at: DrawSizes, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Draw random operands in the order of the form's roles, each with a gradient."""
    make = _of_ssd(spec, at) if spec.form.recurrence == "ssd" else _of_delta(spec, at)
    return [make[role]().to(dtype).requires_grad_() for role in spec.form.roles]


def _normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, device="cpu")


def _of_delta(spec: LinearSpec, at: DrawSizes) -> dict[str, Callable[[], Tensor]]:
    tokens, place = (at.batch, at.length), SORTS.index(at.sort)
    decay = (*tokens, at.heads_v, at.dim_k) if spec.form.channel else (*tokens, at.heads_v)
    # A key longer than 1 makes the delta rule grow.
    shrunk = 1.0 if spec.form.eps is not None else at.dim_k**-0.5
    scale = (1.0, 1e-3, 0.3)[place]
    return {
        "q": lambda: _normal(*tokens, at.heads_k, at.dim_k) * scale,
        "k": lambda: _normal(*tokens, at.heads_k, at.dim_k) * scale * shrunk,
        "v": lambda: _normal(*tokens, at.heads_v, at.dim_v) * (1.0, 1.0, 1e3)[place],
        "g": lambda: (-F.softplus(_normal(*decay)), -1e-3 * _normal(*decay).abs(), 0.05 * _normal(*decay))[place],
        "beta": lambda: _beta(_normal(*tokens, at.heads_v), at.sort),
        "state": lambda: _normal(at.batch, at.heads_v, at.dim_k, at.dim_v),
    }


def _beta(x: Tensor, sort: str) -> Tensor:
    """Draw beta; the unusual sort goes below 0 and above 1."""
    return 0.7 * x.clamp(-1, 1.9) if sort == SORTS[2] else x.sigmoid()


def _of_ssd(spec: LinearSpec, at: DrawSizes) -> dict[str, Callable[[], Tensor]]:
    tokens, place, heads = (at.batch, at.length), SORTS.index(at.sort), at.heads_v
    scale, shift = ((1.0, 0.0), (0.1, -5.0), (12.0, -6.0))[place]

    def dt() -> Tensor:
        # The unusual sort lies on both sides of softplus's threshold.
        drawn = _normal(*tokens, heads) * scale + shift
        return drawn if spec.form.softplus else F.softplus(drawn)

    return {
        "x": lambda: _normal(*tokens, heads, at.dim_v) * (1.0, 1.0, 1e3)[place],
        "dt": dt,
        "A": lambda: -(_normal(heads).exp() * (1.0, 1.0, 0.05)[place]),
        "B": lambda: _normal(*tokens, at.heads_k, at.dim_k),
        "C": lambda: _normal(*tokens, at.heads_k, at.dim_k),
        "D": lambda: _normal(heads),
        "dt_bias": lambda: _normal(heads),
        "state": lambda: _normal(at.batch, heads, at.dim_v, at.dim_k),
    }
