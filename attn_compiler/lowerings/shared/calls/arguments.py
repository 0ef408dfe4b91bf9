"""Arguments of the Triton kernels, computed from a Call and the layout of its tensors, and copies of tensors that they can't read."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton

from attn_compiler.lowerings.shared.calls.by_definition import Attention
from attn_compiler.lowerings.shared.kernels.tuples import AddedStrides, ListStrides, MaskStrides, Strides
from attn_compiler.lowerings.shared.launching.replaying import VECTOR
from attn_compiler.lowerings.shared.parts import score_changes, site_parts as parts
from attn_compiler.lowerings.shared.parts.kernel_plan import FARTHEST, MOST_POSITIONS, Call, Plan
from attn_compiler.spec.attention import AttentionSpec
from attn_compiler.torch_private.symbols import statically_known

Tensors = Sequence[torch.Tensor]
#: tensors of a call, by name
Named = dict[str, torch.Tensor]

#: bound of an open side of a band: longer than any sequence, and sums with a position still fit into int32
_FAR = 1 << 30
#: smallest block of rows of the row stats
STATS_BLOCK = 64
#: widest head dim of a tile: the result of a product twice as wide does not fit into a thread's registers
_WIDEST_PART = 256
#: elements that tensor cores take at once
_LEAST_PART = 16


def head_dim_parts(head_dim: int) -> tuple[int, int]:
    """Return the tile widths that cover a head dim: one power of two, or two where that is less work (80 = 64 + 16) or where one is too
    wide (512 = 256 + 256). Each is at least what tensor cores take at once."""
    whole = max(_LEAST_PART, triton.next_power_of_2(head_dim))
    first = max(_LEAST_PART, whole // 2)
    second = max(_LEAST_PART, triton.next_power_of_2(max(head_dim - first, 1)))
    halved = first < head_dim and first + second < whole
    return (first, second) if halved or whole > _WIDEST_PART else (whole, 0)


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A Call as the kernels take it. constants: the compile-time arguments."""

    call: Call
    plan: Plan
    operands: tuple[str, ...]
    constants: Mapping[str, Any]

    @functools.cached_property
    def any_size(self) -> bool:
        """Return whether q, k or v has a symbolic size, which may differ from call to call."""
        spec = self.call.spec
        return any(isinstance(size, str) for x in (spec.q, spec.k, spec.v) for size in x.shape)

    def named(self, operands: Tensors) -> dict[str, torch.Tensor]:
        """Return the operands by their names. Raises ValueError if their number is not the plan's."""
        return dict(zip(self.operands, operands, strict=True))

    def attention(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tensors: Mapping[str, torch.Tensor]
    ) -> Attention:
        """Return the definition of a call on such tensors."""
        score = self.call.spec.score
        return Attention(
            q=q,
            k=k,
            v=v,
            tensors=tensors,
            scale=score.scale,
            band=self.plan.band,
            change=score.pointwise,
            dropout_p=score.dropout_p,
            means=(torch.inf if self.plan.bias else -torch.inf) if self.call.spec.mask.means else None,
        )

    def present(self, name: str) -> str | None:
        """Return the name if there is such an operand, else None."""
        return name if name in self.operands else None


@functools.lru_cache(maxsize=1024)
def prepare(text: str) -> Prepared:
    """Compute everything that follows from the leaf op's text."""
    call = Call.from_text(text)
    plan = parts.make_plan(call.spec)
    spec = call.spec
    return Prepared(
        call=call,
        plan=plan,
        operands=plan.operands,
        constants={
            **kernel_constants(spec, added=plan.bias or plan.distances or plan.slopes),
            "HAS_LEFT": plan.band is not None and plan.band.left is not None,
            "HAS_RIGHT": plan.band is not None and plan.band.right is not None,
            "DROPOUT": plan.dropout,
            "MASK_ALL": plan.unlisted,
            "ONE_KV": call.one_kv,
            "MARKS_LOW": call.spec.mask.means and plan.bias,
        },
    )


def kernel_constants(spec: AttentionSpec, *, added: bool) -> dict[str, Any]:
    """Return the compile-time arguments that follow from head dims, dtype and scores. added: something is added to the scores.

    Raises TypeError for head dims that are not known.
    """
    if not isinstance(spec.head_dim_qk, int) or not isinstance(spec.head_dim_v, int):
        raise TypeError(f"why_not refuses unknown head dims, got {spec.head_dim_qk!r} and {spec.head_dim_v!r}")
    qk, v = head_dim_parts(spec.head_dim_qk), head_dim_parts(spec.head_dim_v)
    change = spec.score.pointwise
    return {
        "HEAD_DIM_QK": spec.head_dim_qk,
        "HEAD_DIM_V": spec.head_dim_v,
        "QK_0": qk[0],
        "QK_1": qk[1],
        "V_0": v[0],
        "V_1": v[1],
        "CHANGE": score_changes.name(change),
        "FAST_TANH": spec.dtype != "float32" and not triton.knobs.runtime.interpret,
        "PLAIN": change is None and not added and spec.score.scale > 0,
        # tf32 has all digits of a bfloat16 number. The model has rounded all other inputs of products to bfloat16 (recovering/upcasts.py).
        "PRECISION": "tf32" if spec.of_bfloat16 else "ieee",
    }


def strides(name: str, tensor: torch.Tensor) -> dict[str, Strides]:
    """Return the kernels' stride parameter `stride_<name>` for a tensor in logical BHSD, whose last stride is 1."""
    b, h, s, _ = tensor.stride()
    return {f"stride_{name}": Strides(b=b, h=h, s=s)}


def alignment(*tensors: torch.Tensor) -> int:
    """Return a number of elements of which the offset of every head and position is a multiple: a whole vector, or 1.

    Symbolic sizes are multiples where that is known of all their values.
    """
    size = tensors[0].element_size()
    aligned = all(
        statically_known(t.data_ptr() % VECTOR == 0) and all(_is_aligned(t, dim, size) for dim in range(3))
        for t in tensors
    )
    return VECTOR // size if aligned else 1


def _is_aligned(tensor: torch.Tensor, dim: int, size: int) -> bool:
    is_one = statically_known(tensor.shape[dim] == 1)
    return is_one or statically_known(tensor.stride(dim) * size % VECTOR == 0)


def is_far(tensor: torch.Tensor) -> bool:
    """Return whether offsets within a tile may not fit into 32 bits."""
    return not (statically_known(tensor.shape[2] <= 1) or statically_known(tensor.stride(2) <= FARTHEST))


def check_lengths(q: torch.Tensor, k: torch.Tensor) -> None:
    """Raise ValueError for more positions than the kernels count. Where the lengths are known at compile time, `why_not` refuses them."""
    if any(statically_known(x.shape[2] > MOST_POSITIONS) for x in (q, k)):
        raise ValueError(
            f"the Triton kernels take at most {MOST_POSITIONS} positions, got {q.shape[2]} and {k.shape[2]}"
        )


def along(tensor: torch.Tensor | None, dim: int) -> int:
    """Return the stride of an axis, 0 where it broadcasts or there is no tensor."""
    if tensor is None:
        return 0
    size = tensor.shape[dim]
    # Decoding calls this in every step. An int needs no symbolic proof.
    is_one = size == 1 if type(size) is int else statically_known(size == 1)
    return 0 if is_one else tensor.stride(dim)


#: names of the operands by the parameters of the kernels that read them, but for the tile lists
_PARAMETERS = {
    "Rows": "rows",
    "Keys": "keys",
    "DocumentsQ": "documents_q",
    "DocumentsK": "documents_k",
    "Mask": "mask",
    "Bias": "bias",
    "Distances": "distances",
    "Slopes": "slopes",
    "Seed": "seed",
}


def operand_parameters(prepared: Prepared) -> dict[str, str | None]:
    """Return the name of each operand by kernel parameter, but for the tile lists."""
    return {parameter: prepared.present(name) for parameter, name in _PARAMETERS.items()}


def common(prepared: Prepared, tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Return the numbers that every kernel takes, but those of its tile lists. tensors: Q, K, V and the operands, by their names."""
    q, k, v = tensors["Q"], tensors["K"], tensors["V"]
    plan, spec = prepared.plan, prepared.call.spec
    shift = k.shape[2] - q.shape[2] if plan.band is not None and plan.band.from_end else 0
    left = plan.band.left if plan.band is not None else None
    right = plan.band.right if plan.band is not None else None
    check_lengths(q, k)
    return {
        **strides("q", q),
        **strides("k", k),
        **strides("v", v),
        **_operand_strides(tensors),
        "heads_q": q.shape[1],
        "group": q.shape[1] // k.shape[1],
        "seqlen_q": q.shape[2],
        "seqlen_kv": k.shape[2],
        "band_left": _FAR if left is None else _within_reach(left - shift),
        "band_right": _FAR if right is None else _within_reach(right + shift),
        "scale": spec.score.scale,
        "changed_by": score_changes.number(spec.score.pointwise),
        "dropout_p": spec.score.dropout_p,
        "ALIGN": alignment(q, k, v),
        **prepared.constants,
    }


def _within_reach(bound: int) -> int:
    """Clip a bound to the positions that can occur."""
    within: int = torch.sym_max(-_FAR, torch.sym_min(bound, _FAR))  # type: ignore[no-untyped-call]
    return within


def _operand_strides(have: Mapping[str, torch.Tensor]) -> dict[str, MaskStrides | AddedStrides]:
    rows, mask, bias, distances = have.get("rows"), have.get("mask"), have.get("bias"), have.get("distances")
    return {
        "masking": MaskStrides(
            rows_side=0 if rows is None else rows.stride(0),
            rows_b=along(rows, 1),
            keys_b=along(have.get("keys"), 0),
            documents_qb=along(have.get("documents_q"), 0),
            documents_kb=along(have.get("documents_k"), 0),
            **{f"mask_{axis}": along(mask, dim) for dim, axis in enumerate("bhqk")},
        ),
        "adding": AddedStrides(
            **{f"bias_{axis}": along(bias, dim) for dim, axis in enumerate("bhqk")},
            distances_h=along(distances, 0),
            distances_phase=0 if distances is None else distances.stride(1),
        ),
    }


def lists(tiles: torch.Tensor | None) -> dict[str, ListStrides]:
    """Return the strides that locate the list of a batch row, a head and a block."""
    row = 0 if tiles is None else tiles.stride(2)
    return {"lists": ListStrides(tiles_b=along(tiles, 0), tiles_h=along(tiles, 1), tiles_row=row)}


def _misaligned(*tensors: torch.Tensor) -> bool:
    """Return whether any tensor begins between two vectors, in half precision on a GPU. Triton 3.6 compiles wrong code for those where a
    head dim takes two tiles: it reads the wrong elements, or beyond the tensor."""
    return any(x.is_cuda and x.element_size() < 4 and alignment(x) == 1 for x in tensors)


def is_unreadable(*tensors: torch.Tensor) -> bool:
    """Return whether the kernels can't read any of these tensors where it is."""
    return any(not statically_known(x.stride(3) == 1) or is_far(x) for x in tensors) or _misaligned(*tensors)


def readable(x: torch.Tensor) -> torch.Tensor:
    """Return x, or a copy of it if a kernel can't read it where it is.

    This is the one copy outside of the graph. The layout pass handles known strides. No stride tells where a tensor begins in its memory,
    and a slice at an odd element is rare. The layout of an upstream gradient is unknown: a sum expands one number.
    """
    if not is_unreadable(x):
        return x
    copied = x.clone(memory_format=torch.contiguous_format)
    if _misaligned(copied):
        raise ValueError(
            f"the Triton kernels take head dims that are multiples of 8 in half precision, got {x.shape[3]}"
        )
    return copied
