"""The calls of a graph that were spelled out before it is mirrored: data of the room spelling/, read by all later steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from torch import fx

from attn_compiler.reasons.decisions import Reason

#: the pattern of a FlexAttention call
FLEX = "flex attention"
#: the pattern of scores of several sets of keys under one softmax
JOINED = "joined keys"


@dataclass(frozen=True, kw_only=True, eq=False)
class Blocks:
    """The sources of a block mask's blocks.

    dense: a mask over (B or 1, H or 1, Sq, Skv). None: there is one block, which is all.
    """

    dense: fx.Node | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class Spelled:
    """A call that was spelled out: of FlexAttention, of a library's kernel (library_calls.py), or joined scores (joined_keys.py).

    call: the call; for joined scores the node that joins them. It stays in the graph until it is known whether a kernel takes its place.
    own: the call's output in the model.
    product: the attention, spelled out. It is erased where a kernel took its place.
    out: the same with the strides that the call gives it.
    lse: the logsumexp in the model, and the same spelled out; None where nothing reads it.
    nodes: everything that was made for it.
    allowed: mask_mod of every score; None for a library's call.
    blocks: what its block mask says beside mask_mod; None for a library's call.
    pattern: the name of the match.
    kernel: for a library's call that an autograd.Function makes, the node in the body.
    decomposed: as in AttentionSpec.
    replaced: nodes of the model, in their order, that are no attention of their own: what is spelled out stands for them.
    note: what the report says of it.
    """

    call: fx.Node
    own: fx.Node
    product: fx.Node
    out: fx.Node
    nodes: tuple[fx.Node, ...]
    lse: tuple[fx.Node, fx.Node] | None = None
    allowed: fx.Node | None = None
    blocks: Blocks | None = None
    pattern: str = FLEX
    kernel: fx.Node | None = None
    decomposed: bool = False
    replaced: tuple[fx.Node, ...] = ()
    note: str | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class Spelling:
    """The spelled-out calls of one graph.

    expanded: the calls that were spelled out for good.
    moved: the softmaxes whose axis was moved.
    local: calls on local tensors that took the place of calls on DTensors, each with its note.
    calls: FlexAttention's and libraries' calls that are spelled out beside the originals, and removed in the end.
    left: calls that no pattern is tried on, each with the reason.
    """

    expanded: tuple[str, ...] = ()
    moved: tuple[str, ...] = ()
    local: Mapping[fx.Node, str] = field(default_factory=dict)
    calls: tuple[Spelled, ...] = ()
    left: Mapping[fx.Node, Reason] = field(default_factory=dict)

    def leaving(self, left: Mapping[fx.Node, Reason]) -> Spelling:
        """Add calls that no pattern is tried on."""
        return replace(self, left={**self.left, **left}) if left else self

    @property
    def is_any(self) -> bool:
        """Return whether the graph was changed."""
        return bool(self.expanded or self.moved or self.local or self.calls)
