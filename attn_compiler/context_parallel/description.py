"""`ContextParallel`: how a sequence is spread over the ranks of a mesh, and the functions that a training loop needs for that."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from attn_compiler.context_parallel import batches
from attn_compiler.context_parallel.layout import Layout
from attn_compiler.reasons.errors import ContextParallelInput, InvalidOption

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

METHODS = ("auto", "all_gather", "all_to_all", "ring")
LOAD_BALANCES = ("auto", "head_tail", None)
#: bytes of keys and values of one layer of Llama 3 70B at 2^20 positions, in half precision
GATHER_LIMIT = 4 * 2**30


@dataclass(frozen=True, eq=False, slots=True)
class ContextParallel:
    """`options={"context_parallel": ContextParallel(mesh["cp"])}`: each rank has a part of every sequence.

    Raises InvalidOption for a wrong argument when it is built.

    mesh: the DeviceMesh of the ranks that share a sequence; it has one dimension.
    method: what attention exchanges. "all_gather": keys and values; "all_to_all": heads for positions; "ring": keys and values of one rank
        after the other.
    load_balance: "head_tail" gives each rank a chunk of the first half and one of the second; None gives it one. "auto" is "head_tail".
    replicated: names of model inputs that every rank has as a whole.
    allow: names of ops along the sequence that the user knows to be right on a part of it: "aten.cumsum.default".
    packed: a row holds several documents, and position_ids start again with each.
    gather_limit: the most bytes of keys and values of one attention, on all ranks, that "auto" gathers.
    """

    mesh: DeviceMesh
    _: KW_ONLY
    method: Literal["auto", "all_gather", "all_to_all", "ring"] = "auto"
    load_balance: Literal["auto", "head_tail"] | None = "auto"
    replicated: tuple[str, ...] = ()
    allow: tuple[str, ...] = ()
    packed: bool = False
    gather_limit: int = GATHER_LIMIT

    def __post_init__(self) -> None:
        _check_mesh(self.mesh)
        _one_of("method", self.method, METHODS)
        _one_of("load_balance", self.load_balance, LOAD_BALANCES)
        object.__setattr__(self, "replicated", _names("replicated", "names of model inputs", self.replicated))
        object.__setattr__(self, "allow", _names("allow", "names of ops, as 'aten.cumsum.default'", self.allow))
        if not isinstance(self.packed, bool):
            raise _invalid("packed", "True or False", self.packed)
        if isinstance(self.gather_limit, bool) or not isinstance(self.gather_limit, int) or self.gather_limit < 0:
            raise _invalid("gather_limit", "a number of bytes, 0 or more", self.gather_limit)

    @property
    def size(self) -> int:
        """The number of ranks that share a sequence."""
        return self.mesh.size()

    @property
    def rank(self) -> int:
        """The index of this process among the ranks."""
        return self.mesh.get_local_rank()

    @property
    def group_name(self) -> str:
        """The name of the ranks' group in PyTorch's collectives."""
        return str(self.mesh.get_group().group_name)

    @property
    def is_balanced(self) -> bool:
        """True if a rank has two chunks of the sequence. A single rank has the sequence in its own order."""
        return self.load_balance is not None and self.size > 1

    @property
    def digest(self) -> str:
        """A short hash of all that changes compiled code. It is the same on all ranks of the group."""
        names = [sorted(set(self.replicated)), sorted(set(self.allow))]
        data = [self.method, self.is_balanced, self.size, *names, self.packed, self.group_name, self.gather_limit]
        return hashlib.sha256(json.dumps(data).encode()).hexdigest()[:16]

    def to_dict(self) -> dict[str, Any]:
        """Return its arguments, for JSON."""
        names = ("method", "load_balance", "replicated", "allow", "packed", "gather_limit")
        return {"mesh": str(self.mesh), **{name: getattr(self, name) for name in names}}

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ContextParallel):
            return NotImplemented
        return (self.digest, self.rank) == (other.digest, other.rank)

    def __hash__(self) -> int:
        return hash(self.digest)

    def __deepcopy__(self, memo: object) -> ContextParallel:
        """Return itself: it is frozen, and its mesh can't be copied. transformers copies the options of a CompileConfig."""
        return self

    def positions(self, length: int, device: torch.device | str | None = None) -> Tensor:
        """Return int64 (length,): the positions of the whole sequence that this rank has. length: of this rank's part."""
        self._check_part("positions", "length", length)
        return self._layout.positions(length, self.rank, device)

    def shard(
        self, *, dims: Mapping[str, int] | None = None, pad: bool = True, pad_id: int = 0, **batch: Any
    ) -> dict[str, Any]:
        """Return this rank's part of a batch, of which each tensor has the whole sequence and is the same on all ranks.

        The sequence is the last axis of integers and booleans and axis 1 of floating-point numbers, or the axis in dims=. It is padded at
        its end to a length that can be cut, input_ids with pad_id; with pad=False that is an error. position_ids and attention_mask are
        added if they are missing, but no mask of `packed` documents. With labels, shift_labels is added, too: the labels of the next
        positions. Inputs in `replicated`, numbers, texts and None come back as they are. Gradients go back through inputs_embeds.
        Raises ContextParallelInput.
        """
        whole = batches.whole(
            batch, self._layout, replicated=self.replicated, packed=self.packed, dims=dims, pad=pad, pad_id=pad_id
        )
        return whole.part(self._layout, self.rank)

    def unshard(self, x: Tensor, dim: int = 1, *, length: int | None = None) -> Tensor:
        """Return the whole sequence in its order, on every rank. dim: the axis of the sequence. length: before padding, which is cut off.

        x has the same shape on all ranks. Its gradient is that of the sum over the ranks' uses of the result, as for `mean`.
        """
        if not -x.ndim <= dim < x.ndim:
            raise _misused(
                "unshard", "dim", f"x has an axis {dim}", f"a tensor of {tuple(x.shape)}", "Give one that it has"
            )
        self._check_part("unshard", "x", x.shape[dim])
        total = x.shape[dim] * self.size
        if length is not None and not 0 <= length <= total:
            raise _misused(
                "unshard",
                "length",
                f"it is at most {total}, that of all parts",
                f"{length}",
                "Give that before padding",
            )
        whole = x if self.size == 1 else self._gathered(x, dim % x.dim())
        return whole if length is None else whole.narrow(dim, 0, length)

    def mean(self, total: Tensor, count: Tensor | float) -> Tensor:
        """Return the mean of a loss over all tokens: `total` summed over ranks, divided by `count` summed over ranks. The same on all
        ranks.

        The average of its gradients over the ranks, which DDP and FSDP take, is the gradient of that mean.
        """
        if not isinstance(total, Tensor):
            raise _misused(
                "mean", "total", "it is a tensor", f"a {type(total).__name__}", "Give the sum of this rank's losses"
            )
        # float32 can't represent every count above 2**24.
        counts = torch.as_tensor(count, device=total.device, dtype=torch.float64)
        if counts.numel() != 1 and counts.shape != total.shape:
            shapes = f"counts of {tuple(counts.shape)} for totals of {tuple(total.shape)}"
            raise _misused(
                "mean",
                "count",
                "there is one count, or one for each total",
                shapes,
                "Give the sum over this rank's tokens",
            )
        counts = counts if counts.shape == total.shape else counts.reshape(()).expand_as(total)
        both = torch.stack([total.double(), counts])
        if self.size > 1:
            # A late import, so that naming the option loads no op.
            from attn_compiler.context_parallel import collectives as torch_collectives

            both = torch_collectives.summed_over_ranks(both, self.group_name)
        return (both[0] / both[1]).to(total.dtype if total.is_floating_point() else torch.get_default_dtype())

    def _gathered(self, x: Tensor, dim: int) -> Tensor:
        from attn_compiler.context_parallel import collectives as torch_collectives

        whole: Tensor = torch_collectives.gathered_sequence(x, dim, self.size, self.is_balanced, self.group_name)
        return whole

    def _check_part(self, call: str, name: str, length: int) -> None:
        if self.is_balanced and length % 2:
            rule = "a part has two chunks of one length"
            raise _misused(
                call, name, rule, f"a length of {length}", "Give what shard() made a part of, or load_balance=None"
            )

    @property
    def _layout(self) -> Layout:
        return Layout(size=self.size, balanced=self.is_balanced)


def _misused(call: str, name: str, rule: str, observed: str, remedy: str) -> ContextParallelInput:
    return ContextParallelInput(call=call, names=(name,), rule=rule, observed=observed, remedy=remedy)


def _check_mesh(mesh: Any) -> None:
    if not torch.distributed.is_available():
        raise _invalid("mesh", "a DeviceMesh, which this build of torch has not", mesh)
    from torch.distributed.device_mesh import DeviceMesh

    if not isinstance(mesh, DeviceMesh):
        raise _invalid("mesh", "a torch.distributed.DeviceMesh of one dimension", mesh)
    if mesh.ndim != 1:
        names = mesh.mesh_dim_names
        which = f"one of {', '.join(f'mesh[{name!r}]' for name in names)}" if names else "it has no named dimensions"
        raise _invalid("mesh", f"a mesh of one dimension, not of {mesh.ndim}: {which}", mesh)
    if mesh.get_coordinate() is None:
        raise _invalid("mesh", "a mesh that this process is part of", mesh)


def _one_of(name: str, value: Any, allowed: tuple[Any, ...]) -> None:
    if not isinstance(value, str | None) or value not in allowed:
        raise _invalid(name, f"one of {', '.join(map(repr, allowed))}", value)


def _names(name: str, what: str, value: Iterable[str]) -> tuple[str, ...]:
    if not isinstance(value, tuple | list | set | frozenset) or not all(isinstance(one, str) and one for one in value):
        raise _invalid(name, f"a tuple of {what}", value)
    return tuple(sorted(value)) if isinstance(value, set | frozenset) else tuple(value)


def _invalid(name: str, expected: str, value: Any) -> InvalidOption:
    return InvalidOption(option=f"context_parallel: {name}", expected=expected, value=value)
