"""What was recovered of a model's attentions, held against the tensors that the model itself made: every element of both."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from attn_compiler.passes.graph import axes, mirror, mutation, unit
from attn_compiler.passes.graph.mirror import Mirror
from attn_compiler.passes.graph.site import Match, Refused, Term
from attn_compiler.passes.matching.patterns import PATTERNS
from attn_compiler.passes.recovering import elements, meaning, reading
from attn_compiler.passes.recovering.meaning import Meaning
from attn_compiler.passes.recovering.reading import Reader
from attn_compiler.torch_private import tracing as torch_tracing
from tests.passes.mirror_values import MirrorValues
from tests.spec.meanings import Inputs, adds, allows

#: what is this low masks, whatever is added to it
MASKED = -20_000.0


#: the value of what a mirror does not look into, and of all that is computed from it
_UNKNOWN = object()


class _Values(MirrorValues):
    """Also of mirrors that do not look into everything."""

    def run_node(self, n: fx.Node) -> Any:
        unknown = n.target is mirror.opaque or any(self.env[i] is _UNKNOWN for i in n.all_input_nodes)
        result = _UNKNOWN if unknown and n.op == "call_function" else fx.Interpreter.run_node(self, n)
        self.of_node[self._originals[n]] = result
        self.keep(self._originals[n])
        return result


@dataclass(kw_only=True)
class Recovered:
    """One attention: what was recovered, and whether that is what the model computes."""

    match: Match
    reader: Reader
    meaning: Meaning
    values: MirrorValues
    symbols: dict[str, int]

    @property
    def words(self) -> str:
        return " + ".join(kind.words for kind in self.meaning.scores)

    def sizes(self) -> tuple[int, ...]:
        """(B, Hq, Sq, Skv) of this run."""
        groups = (self.match.axes.batch, self.match.axes.heads, self.match.axes.query, self.match.axes.key)
        return tuple(self._number(axes.dim_size(group)) for group in groups)

    def worst(self) -> float:
        """The largest difference between the reference and the model's own tensors, over all scores.

        Infinite if one masks what the other does not.
        """
        mine, theirs = self.reference(), self.original()
        if not torch.equal(mine == -torch.inf, theirs == -torch.inf):
            return torch.inf
        difference = torch.where(mine == -torch.inf, 0.0, mine - theirs)
        return float(difference.abs().max())

    def reference(self) -> Tensor:
        """[B, Hq, Sq, Skv] of the kinds' references: what is added, -inf where it is masked."""
        batch, heads, seqlen_q, seqlen_kv = self.sizes()
        inputs = Inputs(seqlen_q=seqlen_q, seqlen_kv=seqlen_kv, load=self._load, sizes=self.symbols)
        out = torch.zeros(batch, heads, seqlen_q, seqlen_kv)
        for at in itertools.product(*map(range, out.shape)):
            allowed = all(allows(kind, *at, inputs) for kind in self.meaning.kinds)
            out[at] = sum(adds(kind, *at, inputs) for kind in self.meaning.scores) if allowed else -torch.inf
        # A tensor that could not be looked into may mask too.
        return torch.where(out <= MASKED, -torch.inf, out)

    def original(self) -> Tensor:
        """The same of the tensors that the model added or masked with."""
        out = torch.zeros(self.sizes())
        for term in self.match.scores.additive:
            added = self._dense(term).float() * term.weight
            out = torch.where(added <= MASKED, -torch.inf, out + added)
        for term in self.match.scores.allowed:
            allowed = self._dense(term)
            out = torch.where(~allowed if term.inverted else allowed, out, -torch.inf)
        return out

    def _dense(self, term: Term) -> Tensor:
        node, dims = term.operand.node, term.operand.dims
        value = self.values.held(
            mutation.version(self.reader.mirror, node, self.reader.mirror.order(term.operand.used))
        )
        out = torch.empty(self.sizes(), dtype=value.dtype)
        where = elements.indices(self.match, dims)
        for at in itertools.product(*map(range, out.shape)):
            numbers = {**self.symbols, **dict(zip("bhqk", at, strict=True))}
            out[at] = value[tuple(int(reading_value(i, numbers)) for i in where)]
        return out

    def _load(self, name: str, at: tuple[int, ...]) -> Any:
        version = self.meaning.tensors.get(name) or self.reader.tensors[name]
        return self.values.held(version)[at].item()

    def _number(self, size: Any) -> int:
        return int(size.subs({s: self.symbols[str(s)] for s in size.free_symbols}))


def reading_value(x: Any, numbers: dict[str, int]) -> Any:
    """An expression without loads as a number."""
    return Inputs(seqlen_q=0, seqlen_kv=0, sizes=numbers).value(
        x, numbers["b"], numbers["h"], numbers["q"], numbers["k"]
    )


def recover(function: Callable[..., Any], *args: Any, dynamic: bool | None = None, **kwargs: Any) -> list[Recovered]:
    """Every attention of every graph that Dynamo captures of one call, on the values of that call."""
    found: list[Recovered] = []

    def backend(gm: fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        mode = torch_tracing.fake_mode_of_values(unit.examples(gm))
        assert mode is not None
        with torch_tracing.tracing_in(mode):
            graph = mirror.build(gm)
        matches = _matches(graph)

        def run(*inputs: Any) -> Any:
            found.extend(_recovered(gm, graph, matches, inputs))
            return gm.forward(*inputs)

        return run

    torch._dynamo.reset()
    torch.compile(function, backend=backend, dynamic=dynamic)(*args, **kwargs)
    return found


def _matches(graph: Mirror) -> list[Match]:
    found = []
    for node in graph.graph.nodes:
        for pattern in PATTERNS:
            if node.target in pattern.anchors:
                try:
                    found.append(pattern.match(graph, node))
                except Refused:
                    continue
    return found


def _recovered(gm: fx.GraphModule, graph: Mirror, matches: list[Match], inputs: Sequence[Any]) -> list[Recovered]:
    given = dict(zip((n for n in gm.graph.nodes if n.op == "placeholder"), inputs, strict=True))
    arguments, symbols = [], {}
    for node in graph.graph.nodes:
        if node.op != "placeholder":
            continue
        dynamo = graph.dynamo_node(node)
        value = given[dynamo] if dynamo in given else _attribute(gm, dynamo, node)
        arguments.append(value.clone() if isinstance(value, Tensor) else value)
        symbols |= _symbols(node.meta.get("val"), value)
    interpreter = _Values(graph)
    with torch.no_grad():
        interpreter.run(*arguments)
    reader = reading.of(graph)
    return [
        Recovered(
            match=match, reader=reader, meaning=meaning.of(graph, match, reader), values=interpreter, symbols=symbols
        )
        for match in matches
    ]


def _attribute(gm: fx.GraphModule, dynamo: fx.Node | None, node: fx.Node) -> Any:
    assert dynamo is not None, node
    value: Any = gm
    for name in str(dynamo.target).split("."):
        value = getattr(value, name)
    return value


def _symbols(fake: Any, value: Any) -> dict[str, int]:
    if isinstance(fake, torch.SymInt):
        return {str(axes.size_expr(fake)): int(value)}
    if isinstance(fake, Tensor):
        pairs = zip(fake.shape, value.shape, strict=True)
        return {str(axes.size_expr(s)): n for s, n in pairs if isinstance(s, torch.SymInt)}
    return {}
