"""Nodes of the packed graph: each form that is needed is made once, at the place of the model's own node."""

from __future__ import annotations

import contextlib
import math
import operator
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch._subclasses import FakeTensorMode

from attn_compiler.passes.graph import axes, axis_rules, regions
from attn_compiler.passes.graph.axes import Dims
from attn_compiler.passes.graph.mirror import Mirror
from attn_compiler.passes.unpad import indexing
from attn_compiler.passes.unpad.analysis import PRODUCTS, Analysis
from attn_compiler.passes.unpad.forms import FormRecipe, Indexed, KeepsPadding, Kind, Need, call
from attn_compiler.passes.unpad.masks import PackedPairs, PositionBand
from attn_compiler.reasons.codes import Code
from attn_compiler.torch_private import snapshots as torch_snapshots, tracing as torch_tracing

aten = torch.ops.aten


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """Inputs of the packed graph that tell where the real tokens are. number: int, T. The rest: the fields of `unpadding.Batch`."""

    number: fx.Node
    tokens: fx.Node
    rows: fx.Node
    positions: fx.Node
    begins: fx.Node
    ends: fx.Node
    starts: fx.Node
    keys: fx.Node | None = None
    places: fx.Node | None = None

    @property
    def inputs(self) -> list[fx.Node]:
        return [node for node in vars(self).values() if node is not None]


@dataclass(kw_only=True, eq=False)
class Maker:
    """Writes into `graph`, a copy of Dynamo's. copies: of each of Dynamo's own nodes."""

    analysis: Analysis
    graph: fx.Graph
    copies: Mapping[fx.Node, fx.Node]
    mode: FakeTensorMode
    given: Tokens
    made: dict[Need, fx.Node] = field(default_factory=dict)
    _shared: dict[Any, fx.Node] = field(default_factory=dict)
    _owner: fx.Node | None = None
    erased: set[fx.Node] = field(default_factory=set)

    @property
    def mirror(self) -> Mirror:
        return self.analysis.mirror

    # ---- forms ---------------------------------------------------------------------------------------------------------

    def make(self, roots: list[Need]) -> None:
        """Make these forms, and all that they need. Raises KeepsPadding."""
        recipes: dict[Need, FormRecipe] = {}
        waiting = list(roots)
        while waiting:
            need = waiting.pop()
            if need not in recipes:
                recipes[need] = self._recipe(need)
                waiting.extend(recipes[need].needs)
        self._check_kept(recipes)
        for need in [x for x in recipes if x.form == "packed" and self.is_padded(x.node, recipes)]:
            # A product that is computed with padding is taken from there, and not computed twice.
            taken = self.analysis.taken(need.node, self.analysis.value(need.node).dims)
            if taken is not None:
                recipes |= {need: taken, **{x: self._recipe(x) for x in taken.needs}}

        def place(need: Need) -> tuple[int, int]:
            """Order forms as the mirror's nodes; forms of one node come after those that they are made of."""
            own = [place(x)[1] for x in recipes[need].needs if x.node is need.node]
            return self.mirror.order(need.node), 1 + max(own, default=0)

        for need in sorted(recipes, key=place):
            recipe = recipes[need]
            with self._at(need):
                self.made[need] = recipe.make(self, tuple(self.made[x] for x in recipe.needs))

    def facts(self) -> dict[str, list[fx.Node]]:
        """Return the nodes whose facts count, by the facts' words."""
        found: dict[str, list[fx.Node]] = {}
        nodes = {need.node for need in self.made}
        for node, fact in self.analysis.facts.items():
            if node in nodes:
                found.setdefault(fact.words, []).append(node)
        return found

    def _recipe(self, need: Need) -> FormRecipe:
        value = self.analysis.value(need.node)
        if value.lost is not None:
            raise value.lost
        if isinstance(need.form, Indexed):
            return indexing.indexed(need.node, need.form)
        if need.form == "unpacked":
            return indexing.unpacked(self.analysis, need.node, value.dims)
        if need.form == "packed":
            if value.packed is None:
                raise _out_of_reach("what is packed has rows and positions", need.node)
            return value.packed
        return self._plain(need.node)

    def _plain(self, node: fx.Node) -> FormRecipe:
        value = self.analysis.value(node)
        if not value.is_whole:
            raise _out_of_reach("what is read at padding is made without attention", node)
        own = self.mirror.dynamo_node(node)
        if value.kind is Kind.PACKED or (value.kind is Kind.RETURNED and not self.is_kept(node)):
            if value.returned is None:
                raise _out_of_reach("what is made of packed tokens is made of them alone", node)
            return value.returned
        if own is not None:
            return FormRecipe(needs=(), make=lambda _, __: self.copies[own])
        if node.op != "call_function":
            raise _out_of_reach("what is packed is a value of the captured graph", node)
        return call(node, {})

    def is_padded(self, node: fx.Node, made: Container[Need]) -> bool:
        """Return whether a product with weights is computed with padding."""
        if axis_rules.line_of(node) not in PRODUCTS or Need(node, "plain") not in made:
            return False
        whole = self.analysis.value(node).returned
        return whole is None or Need(node, "packed") not in whole.needs

    def is_kept(self, node: fx.Node) -> bool:
        """Return whether the model's own call makes a value below packed ones: the call reads none of those itself."""
        owner = self.mirror.owner(node)
        if owner is None or self.mirror.dynamo_node(node) is None:
            return False
        kinds = [self.kind_of(x) for x in owner.all_input_nodes]
        return all(kind in (None, Kind.ORIGINAL, Kind.RETURNED) for kind in kinds)

    def kind_of(self, dynamo: fx.Node) -> Kind | None:
        """Return the kind of one of Dynamo's own nodes; None if the mirror has no value of it."""
        node = self._values.get(dynamo)
        return None if node is None else self.analysis.value(node).kind

    def __post_init__(self) -> None:
        self._values: dict[fx.Node, fx.Node] = {}
        for node in self.mirror.graph.nodes:
            own = self.mirror.dynamo_node(node) if node.op != "output" else None
            if own is not None:
                self._values.setdefault(own, node)
        self._first = self._after(self.given.starts)
        self._regions = regions.by_node(next(iter(self.copies)).graph)

    def value_of(self, dynamo: fx.Node) -> fx.Node | None:
        """Return the mirror node with the value of a Dynamo node."""
        return self._values.get(dynamo)

    def _check_kept(self, needs: Mapping[Need, FormRecipe]) -> None:
        """Raise KeepsPadding if a value that is read is written in place later."""
        for node in dict.fromkeys(need.node for need in needs):
            if not isinstance(node.meta.get("val"), torch.Tensor):
                continue
            writers = self.mirror.writers_into(node)
            later = [w for w, at in zip(*writers, strict=True) if at > self.mirror.order(node)]
            if later:
                rule = "nothing writes in place to what is packed"
                raise KeepsPadding(Code.PADDING_WRITTEN, rule, f"{later[0].target} writes to {node.name}", at=later[0])

    def drop(self, dynamo: fx.Node) -> None:
        """Erase the copy of a Dynamo node, and the numbers taken from it, where nothing reads them any more."""
        for user in list(self.copies[dynamo].users):
            if not user.users:
                self.graph.erase_node(user)
        self.erased |= {own for own in (dynamo, *dynamo.users) if torch_snapshots.is_erased(self.copies[own])}
        if not self.copies[dynamo].users:
            self.graph.erase_node(self.copies[dynamo])
            self.erased.add(dynamo)

    # ---- places ----------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _at(self, need: Need) -> Iterator[None]:
        """Insert at the place of a node, in its name."""
        owner = self.mirror.owner(need.node) or self.mirror.dynamo_node(need.node)
        if owner is None:
            raise _out_of_reach("what is packed is a value of the captured graph", need.node)
        copy = self.copies[owner]
        is_after = isinstance(need.form, Indexed) or owner.op in ("placeholder", "get_attr")
        place = self._after(copy) if is_after else copy
        self._owner = owner
        with self.graph.inserting_before(place):
            yield
        self._owner = None

    def _after(self, node: fx.Node) -> fx.Node:
        """Return the first node behind it that calls may stand before."""
        found = node.next
        while found.op == "placeholder":
            found = found.next
        return found

    # ---- calls -----------------------------------------------------------------------------------------------------------

    def call(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> fx.Node:
        """Add a node of this call, with its value."""
        node = self.graph.call_function(function, args, kwargs)
        own = self._owner
        if own is not None:
            node.meta.update({k: v for k, v in own.meta.items() if k != "example_value"})
        values = fx.map_arg((args, kwargs), lambda n: n.meta["example_value"])
        with torch_tracing.running_in(self.mode), torch.set_grad_enabled(_wants_gradient(own)), self._region.active():
            node.meta["example_value"] = function(*values[0], **values[1])
        return node

    def once(self, key: Any, make: Callable[[], fx.Node]) -> fx.Node:
        """Return make(), run before all calls, or its earlier result."""
        if key not in self._shared:
            own, self._owner = self._owner, None
            with self.graph.inserting_before(self._first):
                self._shared[key] = make()
            self._owner = own
        return self._shared[key]

    def value(self, node: fx.Node) -> torch.Tensor:
        """Return a node's value: see `on_nodes.NodeMaker`."""
        value: torch.Tensor = node.meta["example_value"]
        return value

    @property
    def _region(self) -> regions.Region:
        return regions.Region() if self._owner is None else self._regions[self._owner]

    def is_token(self) -> fx.Node:
        """Return bool (T,): False for padding that fills up the last step of T."""
        end = self.once("end of tokens", lambda: self.call(aten.select.int, self.given.starts, 0, -1))
        return self.once("is token", lambda: self.call(torch.lt, self._places(), end))

    def row_starts(self) -> fx.Node:
        """Return int64 (B,): the place of the first token of each row."""
        return self.once("row starts", lambda: self.call(aten.slice.Tensor, self.given.starts, 0, 0, -1))

    def row_ends(self) -> fx.Node:
        """Return int64 (B,): the place of the last token of each row."""
        ends = self.once("row ends", lambda: self.call(aten.slice.Tensor, self.given.starts, 0, 1))
        return self.once("last of rows", lambda: self.call(torch.sub, ends, 1))

    def sizes(self, dims: Dims) -> list[int | fx.Node]:
        """Return the sizes of the packed form of a value with these axes."""
        return [self._size(dim) for dim in dims]

    def _size(self, dim: axes.Dim) -> int | fx.Node:
        has_tokens, others = False, 1
        for atom in axes.resolve(dim):
            if atom is self.analysis.seq:
                has_tokens = True
            elif atom is not self.analysis.batch:
                if not atom.size.is_Integer:
                    raise KeepsPadding(Code.PADDING_SIZES, "sizes besides those of the batch are known", str(atom.size))
                others *= int(atom.size)
        if not has_tokens:
            return others
        tokens = self.given.number
        return tokens if others == 1 else self.once(("times", others), lambda: self.call(operator.mul, tokens, others))

    def whole_size(self, axis: int) -> int | fx.Node:
        """Return the number of rows (0) or positions (1) of the padded batch."""
        size = self.analysis.sizes[axis]
        if size.is_Integer:
            return int(size)
        source = self._plain(self.analysis.padding.tensor.node).make(self, ())
        return self.call(aten.sym_size.int, source, axis)

    def whole_number(self) -> int | fx.Node:
        """Return the number of positions of all rows of the padded batch."""
        rows, positions = self.whole_size(0), self.whole_size(1)
        if isinstance(rows, int) and isinstance(positions, int):
            return rows * positions
        return self.call(operator.mul, rows, positions)

    def mask(self, pairs: PackedPairs, tensors: Mapping[str, fx.Node], q: fx.Node) -> fx.Node:
        """Return which tokens of one row see each other: bool (1, 1, T, T); or the additions to their scores: (1, H, T, T) in q's dtype.

        tensors: nodes of the forms that `pairs.scores` reads, by name.
        """
        allowed = self.once(("mask", pairs.band), lambda: self._mask(pairs.band))
        scores = pairs.scores
        if scores is None:
            return allowed
        state = self._region, _wants_gradient(self._owner)  # One of two layers may be in torch.no_grad().
        key = ("scores", pairs.band, scores.key, q.meta["example_value"].dtype, state)
        if key not in self._shared:
            queries, keys = self._of_queries(self._places()), self._keys()
            added = scores.emit(self, tensors, like=q, queries=queries, keys=keys)
            self._shared[key] = self.call(torch.where, allowed, added, -math.inf)
        return self._shared[key]

    def shared_mask(self, window: int) -> fx.Node:
        """Return which keys of the batch each token sees: bool (1, 1, T, B · S)."""

        def make() -> fx.Node:
            begins = self.call(aten.select.int, self.given.begins, 0, window)
            device = self.value(self.given.tokens).device
            keys = self.call(aten.unsqueeze.default, self.call(torch.arange, self.whole_number(), device=device), 0)
            after = self.call(torch.ge, keys, self._of_queries(begins))
            before = self.call(torch.lt, keys, self._of_queries(self.given.ends))
            mask = self.call(torch.logical_and, after, before)
            return self.call(aten.unsqueeze.default, self.call(aten.unsqueeze.default, mask, 0), 0)

        return self.once(("shared", window), make)

    def _mask(self, band: PositionBand) -> fx.Node:
        mask = self.once("same row", self._same_row)
        for relation, bound in ((torch.ge, 0 if band.causal else band.right), (torch.le, band.left)):
            if bound is not None:
                allowed = self.call(relation, self._ahead(), -bound if relation is torch.ge else bound)
                mask = self.call(torch.logical_and, mask, allowed)
        return self.call(aten.unsqueeze.default, self.call(aten.unsqueeze.default, mask, 0), 0)

    def _ahead(self) -> fx.Node:
        """Return int64 (T, T): the query's distance behind the key among the tokens of all rows."""
        return self.once("ahead", lambda: self.call(torch.sub, self._of_queries(self._places()), self._keys()))

    def _same_row(self) -> fx.Node:
        """Return bool (T, T), as an interval of each query: kernels compare two numbers a query with places that they know."""
        begins, ends = self._of_queries(self.given.begins), self._of_queries(self.given.ends)
        after, before = self.call(torch.ge, self._keys(), begins), self.call(torch.lt, self._keys(), ends)
        return self.call(torch.logical_and, after, before)

    def _keys(self) -> fx.Node:
        """Return int64 (1, T): the places of keys."""
        return self.once("keys", lambda: self.call(aten.unsqueeze.default, self._places(), 0))

    def _places(self) -> fx.Node:
        """Return the places of tokens, int64 (T,)."""
        device = self.given.tokens.meta["example_value"].device
        return self.once("places", lambda: self.call(torch.arange, self.given.number, device=device))

    def _of_queries(self, x: fx.Node) -> fx.Node:
        """View (T,) as (T, 1)."""
        return self.call(aten.unsqueeze.default, x, 1)


def _out_of_reach(rule: str, node: fx.Node) -> KeepsPadding:
    return KeepsPadding(Code.PADDING_OUT_OF_REACH, rule, node.name, at=node)


def _wants_gradient(own: fx.Node | None) -> bool:
    """Return the grad mode of a node, judged by the model's own value."""
    value = None if own is None else own.meta.get("example_value")
    values = value if isinstance(value, (tuple, list)) else [value]
    return any(isinstance(x, torch.Tensor) and x.requires_grad for x in values)
