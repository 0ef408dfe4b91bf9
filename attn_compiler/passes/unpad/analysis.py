"""Forward analysis, from inputs to outputs: the forms in which each value of the mirror can be had without padding."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from attn_compiler.passes.graph import axes, axis_rules, gradients, mutation, views
from attn_compiler.passes.graph.axes import Atom, AxisError, Dims
from attn_compiler.passes.graph.mirror import Mirror, opaque
from attn_compiler.passes.graph.site import Site
from attn_compiler.passes.unpad import exits, forms, indexing, rules
from attn_compiler.passes.unpad.exits import RuntimeFact
from attn_compiler.passes.unpad.forms import POSITION_WISE, FormRecipe, Indexed, KeepsPadding, Kind, Need, Value, places
from attn_compiler.passes.unpad.masks import PackedPairs, Padding
from attn_compiler.reasons.codes import Code

aten = torch.ops.aten
#: lines of products with weights
PRODUCTS = [axis_rules.RULES[op] for op in (aten.linear.default, aten.mm.default, aten.addmm.default)]
SDPA = aten.scaled_dot_product_attention.default


class Analysis:
    """The forms of every value. batch, seq: the atoms of rows and positions; one atom if there is one row, whose axis any other axis of
    size one could be. sizes: of the mask. facts: by the mirror node that rests on it.

    is_shared: each position has a token that stands for it, in place of padding.
    """

    is_shared = False

    def __init__(self, mirror: Mirror, padding: Padding, pairs: Mapping[Site, PackedPairs]) -> None:
        shape = axes.shape_exprs(views.value(padding.tensor.node))
        if len(shape) != 2:
            raise KeepsPadding(
                Code.PADDING_MASK, "the mask has an axis of rows and one of positions", f"shape {tuple(shape)}"
            )
        if shape[1] == axes.ONE:
            raise KeepsPadding(Code.PADDING_MASK, "a batch has more than one position", f"the mask is {shape}")
        self.mirror = mirror
        self.padding = padding
        self.sizes = shape
        self.seq = Atom(shape[1])
        self.batch = self.seq if shape[0] == axes.ONE else Atom(shape[0])
        self.atoms = tuple(dict.fromkeys((self.batch, self.seq)))
        self.facts: dict[fx.Node, RuntimeFact] = {}
        self._pairs = {site.match.anchor: own for site, own in pairs.items()}
        self._values: dict[fx.Node, Value] = {}
        self._inputs: dict[fx.Node, frozenset[fx.Node]] = {}
        self._of_all: set[fx.Node] = set()
        for node in mirror.graph.nodes:
            if node.op != "output":
                self._values[node] = self._seen(node)
                self._inputs[node] = self._made_of(node)

    def value(self, node: fx.Node) -> Value:
        return self._values[node]

    def _seen(self, node: fx.Node) -> Value:
        if node.op != "call_function":
            return self._leaf(node)
        given = [self._values[x] for x in node.all_input_nodes]
        lost = next((x.lost for x in given if x.kind is Kind.LOST), None)
        if node.target is aten.as_strided.default and any(x.kind is not Kind.ORIGINAL for x in given):
            lost = lost or forms.refused(node, "it reads memory as it lies, and strides may differ")
        if lost is not None:
            return Value(kind=Kind.LOST, lost=lost)
        is_exact = all(value.is_exact for value in given)
        if node.target is SDPA:
            return self._attention(node)
        try:
            value = rules.packed_result(self, node)
        except (KeepsPadding, AxisError) as error:
            why = error if isinstance(error, KeepsPadding) else forms.refused(node, str(error))
            return self._plain(node, given) if is_exact else self._exit(node, why)
        is_known = any(x.at_padding is not None for x in given)
        if is_exact and (self.is_shared or not is_known or axis_rules.line_of(node) not in PRODUCTS):
            return self._of_kind(node, given, value)
        if value.packed is None:
            return self._exit(node, forms.refused(node, "it reads more than each position by itself"))
        value.returned = self._whole(node, value.dims, value.at_padding)
        return value

    def _whole(self, node: fx.Node, dims: Dims = (), number: float | None = None) -> FormRecipe | None:
        """Return the recipe of the model's own tensor: it is known at padding, or made of operands that are."""
        number = 0 if self.is_shared else number
        if number is not None and number == number and forms.has_both(self, dims):
            with contextlib.suppress(KeepsPadding):
                return indexing.unpacked(self, node, dims, number)
        is_known = number == number and all(self._values[x].is_whole for x in node.all_input_nodes)
        is_refused = rules.draws(node) or mutation.writes(node) or node.target is opaque
        return forms.call(node, {}) if is_known and not is_refused else None

    def _made_of(self, node: fx.Node) -> frozenset[fx.Node]:
        """Return the inputs of (rows, positions, ...) that a value is computed from."""
        if node.op == "call_function":
            return frozenset().union(*(self._inputs[x] for x in node.all_input_nodes))
        return frozenset((node,)) if forms.has_both(self, self._values[node].dims) else frozenset()

    def _leaf(self, node: fx.Node) -> Value:
        """Describe an input. One of (rows, positions, ...) may be seen as one of positions: that claims nothing."""
        dims = forms.fresh(node)
        if self._is_of_positions(node, dims):
            dims = (*self._of_mask_dims(), *dims[2:])
        return Value(kind=Kind.ORIGINAL, dims=dims, packed=self.taken(node, dims), at_padding=self._of_mask(node))

    def _of_mask(self, node: fx.Node) -> bool | int | None:
        """Return the mask's own value at padding: 0, or another number if the mask's kind tells it, or 1 if attentions ask for 1."""
        if node is not self.padding.tensor.node or gradients.carries(self.mirror, node):
            return None
        is_bool = node.meta["val"].dtype == torch.bool
        if not self.padding.negated:
            return False
        return True if is_bool else 1 if self.padding.is_asked else None

    def _is_of_positions(self, node: fx.Node, dims: Dims) -> bool:
        dynamo = self.mirror.dynamo_node(node)
        example = None if dynamo is None else dynamo.meta.get("example_value")
        if len(dims) < 2 or isinstance(example, torch.nn.Parameter):
            return False
        pairs = zip(dims, self._of_mask_dims(), strict=False)
        return all(axes.same_size(axes.dim_size(dim), axes.dim_size(own)) for dim, own in pairs)

    def _of_mask_dims(self) -> Dims:
        """Return the axes of the mask."""
        return ((), (self.seq,)) if self.batch is self.seq else ((self.batch,), (self.seq,))

    def taken(self, node: fx.Node, dims: Dims) -> FormRecipe | None:
        """Return the recipe that indexes a plain value at the real tokens."""
        if not forms.has_both(self, dims):
            return None
        (i,), (j,) = places(dims, self.batch), places(dims, self.seq)
        with contextlib.suppress(KeepsPadding):
            forms.require_alone(self, node, dims, (i, j))
            form = Indexed(batch=i, seq=j, rank=len(dims))
            return FormRecipe(needs=(Need(node, form),), make=lambda _, given: given[0])
        return None

    def _plain(self, node: fx.Node, given: list[Value]) -> Value:
        dims = self._of_mask_dims() if node is self.padding.tensor.node else forms.fresh(node)
        number = rules.of_constant(self.mirror, node)
        return self._of_kind(node, given, Value(kind=Kind.ORIGINAL, dims=dims, at_padding=number))

    def _of_kind(self, node: fx.Node, given: list[Value], value: Value) -> Value:
        """Complete the analysis of a node that reads the model's own values. value: what is known of it by its op."""
        if any(x.kind is Kind.RETURNED for x in given):
            value.kind, value.returned = Kind.RETURNED, forms.call(node, {})
        else:
            value.kind = Kind.ORIGINAL
        if (number := self._of_mask(node)) is not None:
            value.at_padding = number
        if not forms.has_both(self, value.dims) and not self._of_all.isdisjoint(node.all_input_nodes):
            value.dims = self._tokens_in(node)
        if isinstance(node.meta.get("val"), torch.Tensor):
            if mutation.is_written_later(self.mirror, node):
                value.packed = value.at_padding = None
            elif value.packed is None and value.several is None:
                value.packed = self.taken(node, value.dims)
        return value

    def _exit(self, node: fx.Node, why: KeepsPadding) -> Value:
        found = exits.exit_at(self, node)
        if found is None:
            return self._mixed(node, why)
        if found.fact is not None:
            self.facts[node] = found.fact
        return Value(kind=Kind.RETURNED, dims=forms.fresh(node), returned=found.returned)

    def _mixed(self, node: fx.Node, why: KeepsPadding) -> Value:
        """Let an op that mixes positions read the model's own tensors."""
        returned = self._whole(node)
        if returned is None:
            return Value(kind=Kind.LOST, lost=why)
        dims = self._tokens_in(node)
        return Value(kind=Kind.RETURNED, dims=dims, packed=self.taken(node, dims), returned=returned)

    def _tokens_in(self, node: fx.Node) -> Dims:
        """Return the axes of what is made of all positions: those of rows and of positions are told by their sizes.

        Any axes of these sizes may be seen so. Where several have them, those of an operand are taken.
        """
        self._of_all.add(node)
        dims = list(forms.fresh(node))
        likely = next((v.dims for v in map(self.value, node.all_input_nodes) if forms.has_both(self, v.dims)), ())
        found = []
        for atom in self.atoms:
            sized = [i for i, dim in enumerate(dims) if axes.same_size(axes.dim_size(dim), atom.size)]
            as_before = [i for i in sized if len(likely) == len(dims) and atom in axes.resolve(likely[i])]
            found.append(as_before or sized)
        if len(dims) > 2 and all(len(x) == 1 for x in found) and len({x[0] for x in found}) == len(found):
            for atom, (i,) in zip(self.atoms, found, strict=True):
                dims[i] = (atom,)
        return tuple(dims)

    def _attention(self, node: fx.Node) -> Value:
        pairs = self._pairs.get(node)
        if pairs is None:
            seen = "an attention that was not understood"
            return Value(kind=Kind.LOST, lost=KeepsPadding(Code.PADDING_OTHER_CALLS, POSITION_WISE, seen, at=node))
        operands = [x for x in node.args[:3] if isinstance(x, fx.Node)]
        for x in operands:
            value = self.value(x)
            found = [forms.tags(self, value.dims[i]) for i in (0, 2)] if len(value.dims) == 4 else []
            if value.packed is None or found != [forms.tags(self, dim) for dim in self._of_mask_dims()]:
                rule = "q, k and v are (rows, heads, positions, head dim) of the tokens that the mask is of"
                why = KeepsPadding(Code.PADDING_TOKENS, rule, f"not {x.name}: a cache, or other tokens", at=node)
                if mutation.is_written_later(self.mirror, x):
                    rule = "nothing writes in place to what is packed"
                    why = KeepsPadding(Code.PADDING_WRITTEN, rule, f"{x.name} is written to later", at=x)
                return Value(kind=Kind.LOST, lost=why)
        if self._inputs[operands[0]] != self._inputs[operands[1]]:
            # The mask tells of the keys' tokens alone. Queries may be others, in a batch of the same sizes.
            rule = "queries and keys are of the same tokens"
            why = KeepsPadding(Code.PADDING_TOKENS, rule, "queries and keys are made of different inputs", at=node)
            return Value(kind=Kind.LOST, lost=why)
        if pairs.count_positions:
            self.facts[node] = exits.side_by_side()
        arguments = {name: views.argument(node, name) for name in ("dropout_p", "scale", "enable_gqa")}

        further = {} if pairs.scores is None else pairs.scores.tensors

        def make(maker: Any, given: tuple[fx.Node, ...]) -> fx.Node:
            mask = maker.mask(pairs, dict(zip(further, given[3:], strict=True)), given[0])
            made: fx.Node = maker.call(
                torch.nn.functional.scaled_dot_product_attention, *given[:3], attn_mask=mask, **arguments
            )
            return made

        dims = (*self.value(operands[0]).dims[:3], *axes.fresh(axes.shape_exprs(views.value(node))[3:]))
        needs = (*(Need(x, "packed") for x in operands), *further.values())
        return Value(kind=Kind.PACKED, dims=dims, packed=FormRecipe(needs=needs, make=make))
