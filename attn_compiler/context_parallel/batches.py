"""A rank's part of a batch: whole tensors are padded, and tensors that models need beside them are added, before they are cut.

All that is a function of the batch, the layout and the rank. So every rank's part can be looked at in one process.
"""

from __future__ import annotations

import numbers
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attn_compiler.context_parallel.layout import Layout
from attn_compiler.reasons.errors import ContextParallelInput

#: the label that losses leave out: the default of torch.nn.functional.cross_entropy's ignore_index
IGNORED = -100
#: inputs whose last axis is the sequence: (B, S), and (3, B, S) for position_ids
_LAST = frozenset({"input_ids", "attention_mask", "position_ids", "labels", "shift_labels", "token_type_ids"})
#: inputs of (B, S, H)
_SECOND = frozenset({"inputs_embeds"})
#: inputs whose rows are those of the batch, the surest first
_ROWS = ("input_ids", "inputs_embeds", "labels", "shift_labels", "attention_mask", "token_type_ids")
_TARGETS = ("labels", "shift_labels")
#: (4, B, S): the first of four holds positions in the text, the others those of multimodal rotary embeddings.
_TEXT_FIRST = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Whole:
    """A batch that can be cut.

    tensors: along the sequence, of the same length. axes: the axis of each that is the sequence. others: values that each rank has.
    """

    tensors: dict[str, Tensor]
    axes: dict[str, int]
    others: dict[str, Any]

    def part(self, layout: Layout, rank: int) -> dict[str, Any]:
        """Return a rank's part of the batch."""
        parts = {name: layout.part(x, self.axes[name], rank) for name, x in self.tensors.items()}
        return {**parts, **self.others}


def whole(
    batch: Mapping[str, Any],
    layout: Layout,
    *,
    replicated: tuple[str, ...] = (),
    packed: bool = False,
    dims: Mapping[str, int] | None = None,
    pad: bool = True,
    pad_id: int = 0,
) -> Whole:
    """Return the batch, padded, with position_ids, attention_mask and shift_labels where they are missing and not in `replicated`.

    packed: a row holds several documents. No attention_mask is added, and what is padded is one more document.
    dims: the axis of the sequence, where name and dtype do not tell it. Raises ContextParallelInput for what can't be cut.
    """
    given = {name: value for name, value in batch.items() if _is_cut(name, value, replicated)}
    others = {name: value for name, value in batch.items() if name not in given}
    axes = _axes(given, dims or {})
    length = _length(given, axes)
    pads = layout.padded(length) - length
    if pads and not pad:
        raise _refused(
            tuple(given),
            f"without padding the length is a multiple of {layout.chunks}",
            f"{length}",
            f"The next length that can be cut is {length + pads}; pad=True pads",
        )
    if pads and isinstance(others.get("attention_mask"), Tensor):
        raise _refused(
            ("attention_mask",),
            "what is padded is masked out, which a mask that is replicated does not say",
            f"a length of {length}, of which the next multiple of {layout.chunks} is {length + pads}",
            "Give sequences of that length, or an attention_mask that is cut",
        )
    if packed and "position_ids" not in given:
        raise _refused(
            ("position_ids",),
            "with packed=True they say where documents begin",
            "none",
            "Give position_ids (B, S) that start again with each document",
        )
    if not packed and "position_ids" in given and "attention_mask" not in given:
        _check_one_document(given["position_ids"], axes["position_ids"])
    added = _added(given, axes, length, pads, {*replicated, *(("attention_mask",) if packed else ())})
    tensors = {name: _padded(name, x, axes[name], pads, pad_id, packed=packed) for name, x in given.items()}
    axes |= {name: x.ndim - 1 for name, x in added.items()}
    kept = {name: value for name, value in others.items() if name not in added}
    return Whole(tensors=tensors | added, axes=axes, others=kept)


def _is_cut(name: str, value: Any, replicated: tuple[str, ...]) -> bool:
    """Return whether a value is a tensor along the sequence, of which each rank gets a part."""
    if name in replicated or value is None or isinstance(value, numbers.Number | str):
        return False
    if isinstance(value, Tensor):
        return value.ndim > 0
    if name == "attention_mask":
        raise _no_padding_mask(f"a {type(value).__name__}")
    raise _refused(
        (name,),
        "what is cut is a tensor",
        f"a {type(value).__name__}",
        f"Give a tensor, or name it in ContextParallel(..., replicated=({name!r},)) if every rank has it as a whole",
    )


def _axes(given: Mapping[str, Tensor], dims: Mapping[str, int]) -> dict[str, int]:
    unknown = [name for name in dims if name not in given]
    if unknown:
        raise _refused(
            tuple(unknown), "dims= names tensors that are cut", f"dims={dict(dims)!r}", f"There are {', '.join(given)}"
        )
    axes = {name: _axis(name, x, dims.get(name)) for name, x in given.items()}
    flat = [name for name, x in given.items() if x.ndim == 1 and name not in dims]
    if flat and len(flat) < len(given):
        raise _refused(
            tuple(flat),
            "beside tensors of rows, one of a single axis may be along the sequence or along the batch",
            ", ".join(f"{name} {tuple(x.shape)}" for name, x in given.items()),
            _which(flat[0]),
        )
    return axes


def _axis(name: str, x: Tensor, dim: int | None) -> int:
    if name == "attention_mask" and x.ndim != 2:
        raise _no_padding_mask(f"a tensor of {tuple(x.shape)}")
    along_last = name in _LAST or not (name in _SECOND or x.is_floating_point() or x.is_complex())
    axis = dim if dim is not None else -1 if along_last else 1
    if not -x.ndim <= axis < x.ndim:
        rule = (
            "a tensor of floating-point numbers is (B, S, ...)"
            if dim is None
            else f"it has an axis {dim}, as dims= says"
        )
        raise _refused((name,), rule, f"a tensor of {tuple(x.shape)}", _which(name))
    return axis % x.ndim


def _length(given: Mapping[str, Tensor], axes: Mapping[str, int]) -> int:
    lengths = {name: x.shape[axes[name]] for name, x in given.items()}
    if not lengths:
        raise _refused((), "one tensor along the sequence is there", "none", "Give input_ids or inputs_embeds")
    if len(set(lengths.values())) > 1:
        # The message asks about the tensor with the odd length.
        common = max(lengths.values(), key=list(lengths.values()).count)
        odd = [name for name, length in lengths.items() if length != common]
        raise _refused(
            tuple(lengths),
            "all sequences have one length",
            ", ".join(
                f"{name} {length} (axis {axes[name]} of {tuple(given[name].shape)})" for name, length in lengths.items()
            ),
            _which(odd[0]),
        )
    length = next(iter(lengths.values()))
    if length == 0:
        raise _refused(tuple(lengths), "a sequence has positions", "none", "Leave an empty batch out on every rank")
    return length


def _added(
    given: Mapping[str, Tensor], axes: Mapping[str, int], length: int, pads: int, left: set[str]
) -> dict[str, Tensor]:
    """Return inputs that models would otherwise make from a part of the sequence, and wrongly. Their last axis is the sequence."""
    name = next((name for name in _ROWS if name in given), next(iter(given)))
    shape, device = _rows(given[name], axes[name]), given[name].device
    positions = torch.arange(length + pads, device=device)
    added: dict[str, Tensor] = {}
    if "position_ids" not in given.keys() | left:
        added["position_ids"] = positions.expand(*shape, -1).contiguous()
    if "attention_mask" not in given.keys() | left:
        added["attention_mask"] = (positions < length).long().expand(*shape, -1).contiguous()
    labels = given.get("labels")
    if labels is not None and "shift_labels" not in given.keys() | left and not labels.is_floating_point():
        rows = labels.movedim(axes["labels"], -1)
        added["shift_labels"] = torch.nn.functional.pad(rows[..., 1:], (0, pads + 1), value=IGNORED)
    return added


def _rows(x: Tensor, axis: int) -> tuple[int, ...]:
    """Return the axes before the sequence in (B, S): none for a sequence without a batch."""
    if x.ndim == 1:
        return ()
    return (1,) if axis == 0 else (x.shape[axis - 1],)


def _check_one_document(positions: Tensor, axis: int) -> None:
    """Refuse positions that start again in a row: models of transformers without an attention_mask take them for packed documents."""
    if positions.ndim == 3 and positions.shape[0] == _TEXT_FIRST:
        positions, axis = positions[0], axis - 1
    if positions.ndim <= 2 and bool((positions.diff(dim=axis) != 1).any()):
        raise _refused(
            ("position_ids",),
            "without an attention_mask each row is one document, so positions do not start again in a row",
            "positions that do",
            "Give attention_mask=torch.ones_like(input_ids) if a row is one document all the same. If it holds several, "
            "ContextParallel(..., packed=True) has every attention read where they begin",
        )


def _padded(name: str, x: Tensor, axis: int, pads: int, pad_id: int, *, packed: bool) -> Tensor:
    if not pads:
        return x
    shape = list(x.shape)
    shape[axis] = pads
    if name == "position_ids":
        # Positions go on, so that a mask of positions hides the padding behind the sequence. Or the padding is a document of its own.
        steps = torch.arange(1, pads + 1, device=x.device, dtype=x.dtype)
        last = x.narrow(axis, x.shape[axis] - 1, 1)
        last = torch.full_like(last, -1) if packed else last
        return torch.cat([x, (last.movedim(axis, -1) + steps).movedim(-1, axis)], axis)
    if name in _TARGETS and x.is_floating_point():
        raise _refused(
            (name,),
            "padded labels are left out of the loss, which floating-point numbers can't say",
            f"{x.dtype}, and a length of {x.shape[axis]}",
            f"Give sequences of {x.shape[axis] + pads}",
        )
    value = IGNORED if name in _TARGETS else pad_id if name == "input_ids" else 0
    return torch.cat([x, x.new_full(shape, value)], axis)


def _no_padding_mask(observed: str) -> ContextParallelInput:
    return _refused(
        ("attention_mask",),
        "it is a padding mask of (B, S): the model makes its masks of that",
        observed,
        "Give that mask. Of a mask of queries and keys, which is one of the whole sequence, a rank has no part",
    )


def _which(name: str) -> str:
    return (
        f"Say which axis is the sequence by dims={{{name!r}: ...}}, or name it in ContextParallel(..., replicated=({name!r},)) if every "
        "rank has it as a whole"
    )


def _refused(names: tuple[str, ...], rule: str, observed: str, remedy: str) -> ContextParallelInput:
    return ContextParallelInput(call="shard", names=names, rule=rule, observed=observed, remedy=remedy)
