"""One attention found in a mirror: its tensors, and the meaning of their axes. Every pass adds its own part.

Site space: one set of atoms (axes.py) for batch, head, query, key and head-dim axes, shared by all tensors of the site.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import fx

from attn_compiler.index_expr import Expr
from attn_compiler.passes.graph.axes import Atom, Dim, Dims, resolve
from attn_compiler.passes.graph.mutation import Version
from attn_compiler.reasons.codes import Code
from attn_compiler.reasons.decisions import Copy, Decision, Estimate, Evidence, Faster, Reason
from attn_compiler.spec.attention import AttentionSpec
from attn_compiler.spec.scores import ScoreChange

#: note on a mask from outside compiled code, of which nothing is known
COMES_IN = (
    "the mask comes in from where nothing compiled made it; what compiled code makes stays known in other graphs "
    "(integrations.transformers.compile_model does that for layers of Hugging Face models)"
)


class Refused(Exception):
    """A stop of matching, with its reason and node. Internal: becomes a Miss, never reaches a user."""

    def __init__(
        self, code: Code, rule: str, observed: str, *, at: fx.Node, progress: int, remedy: str | None = None
    ) -> None:
        super().__init__(rule)
        self.reason = Reason(code=code, rule=rule, observed=observed, remedy=remedy)
        self.at = at
        self.progress = progress


@dataclass(frozen=True, kw_only=True)
class Miss:
    """An anchor that no pattern took. nearest: the pattern that came furthest, and where it stopped."""

    anchor: fx.Node
    nearest: str
    stopped_at: fx.Node
    reason: Reason


@dataclass(kw_only=True, eq=False)
class Operand:
    """A tensor of the site, and how to read it.

    node: the tensor as the model uses it (mirror).
    used: the node that uses it.
    dims: for each dimension of `node`, the site's atoms.
    root: the mirror node to read instead. It stands above repetitions, copies and folded scales.
    root_dims: for each dimension of `root`, atoms of its own.
    reads: site atom -> root atom. A site atom that is missing here does not change which element is read.
    kept: why a kernel that saves the tensor has to save a copy (saved.py); None if it need not.
    """

    node: fx.Node
    used: fx.Node
    dims: Dims
    root: fx.Node
    root_dims: Dims
    reads: dict[Atom, Atom]
    kept: str | None = None

    def varies_along(self, atom: Atom) -> bool:
        """Return whether an index along this site atom changes the element read."""
        own = {a for dim in self.root_dims for a in resolve(dim)}
        return self.reads.get(atom) in own


@dataclass(frozen=True, kw_only=True)
class Joining:
    """Effect of a tensor on the scores that it joins.

    weight: the factor that the tensor has in the end.
    weighed_in: the dtype that the model multiplies by the weight in; None: that of the tensor.
    inverted: True means masked out (bool tensors alone).
    fill: the number that a masked score is in the end (bool tensors alone).
    replaces: the fill took the place of the score, and was not added to it (bool tensors alone).
    by_numbers: the tensor has numbers in place of truth values, which have to be 0 and 1.
    again: a masked weight is set to zero once more (bool tensors alone).
    """

    weight: float = 1.0
    weighed_in: torch.dtype | None = None
    inverted: bool = False
    fill: float = -math.inf
    replaces: bool = False
    by_numbers: bool = False
    again: bool = False


@dataclass(frozen=True, kw_only=True)
class Term(Joining):
    """A tensor that joins the scores.

    along: the indices, of "bhqk", that elements may depend on. Along the other indices all elements are equal, and one is enough.
    """

    operand: Operand
    along: str = "bhqk"


@dataclass(frozen=True, kw_only=True)
class Limit:
    """Bounds on the scores, times the factors that follow.

    low: no score is below it.
    high: no score is above it.
    of_dtype: no number of the scores' dtype is beyond the bounds.
    """

    low: float = -math.inf
    high: float = math.inf
    of_dtype: bool = False

    def scaled(self, factor: float) -> Limit:
        """Return the same limit on scores that are multiplied."""
        low, high = sorted((self.low * factor, self.high * factor))
        return replace(self, low=low, high=high)

    def is_idle(self, lowest: float, highest: float) -> bool:
        """Return whether the limit changes no score between `lowest` and `highest`."""
        return self.of_dtype or (self.low <= lowest and highest <= self.high)


@dataclass(frozen=True, kw_only=True)
class Factor:
    """A scale that is known at run time only.

    node: a mirror node: a symbolic number, or a tensor.
    divide: the scores are divided by it.
    operand: the tensor along batch, heads and queries; None for a number and for a tensor without axes.
    """

    node: fx.Node
    divide: bool = False
    operand: Operand | None = None


@dataclass(frozen=True, kw_only=True)
class Stored:
    """K or V in an FP8 cache. operand: reads the FP8 tensor. scale: the mirror node of a 0-d tensor that multiplies it."""

    operand: Operand
    scale: fx.Node | None = None


@dataclass(frozen=True, kw_only=True)
class Projection:
    """Rows of a weight (heads · each, rank): for each head h, `size` rows from h · each + first on. made: the mirror node they make."""

    weight: fx.Node
    made: fx.Node
    heads: int
    each: int
    first: int
    size: int


@dataclass(frozen=True, kw_only=True, eq=False)
class Latent:
    """The tensors of which k and v are linear maps.

    latent: reads the latent.
    rank: the latent's last axis.
    rope: reads the part of k that all heads share; None where there is none.
    rope_dim: that part's last axis.
    k, v: the projections from the latent to k's other part, and to v.
    nope_first: k begins with the part made from the latent.
    made_for: the Dynamo nodes that make k and v from the latent, and that nothing else needs.
    """

    latent: Operand
    rank: Dim
    rope: Operand | None
    rope_dim: Dim
    k: Projection
    v: Projection
    nope_first: bool
    made_for: frozenset[fx.Node]

    @property
    def sources(self) -> tuple[fx.Node, ...]:
        """Return the mirror nodes that are read."""
        rope = () if self.rope is None else (self.rope.root,)
        return (self.latent.root, *rope, *dict.fromkeys((self.k.weight, self.v.weight)))


@dataclass(frozen=True, kw_only=True, eq=False)
class SiteAxes:
    """The axes of a site by their meaning; settled when the site is matched."""

    batch: Dim
    heads: Dim
    heads_kv: Dim
    query: Dim
    key: Dim
    head_dim_qk: Dim
    head_dim_v: Dim


@dataclass(frozen=True, kw_only=True, eq=False)
class SiteScores:
    """The changes to the scores: first as a pattern read them, then as recover left them.

    scale: the factor on the scores that is known now.
    factors: further factors, which are known at run time only.
    is_causal: query q uses keys up to q.
    changes: what happens to each score, in order. Sinks, and tensors that are added, have fields of their own.
    additive: tensors that are added to the scores.
    allowed: tensors that say which scores take part.
    limits: clamps on the scores.
    sinks: one logit a head that joins the softmax and is dropped after it; a number: one logit for all heads.
    dropout_p: the share of weights that is dropped.
    softmax_dtype: the dtype that the model's softmax runs in.
    """

    scale: float = 1.0
    factors: tuple[Factor, ...] = ()
    is_causal: bool = False
    changes: tuple[ScoreChange, ...] = ()
    additive: tuple[Term, ...] = ()
    allowed: tuple[Term, ...] = ()
    limits: tuple[Limit, ...] = ()
    sinks: Operand | float | None = None
    dropout_p: float = 0.0
    softmax_dtype: str = "float32"

    @property
    def terms(self) -> tuple[Term, ...]:
        """Return all tensors that join the scores."""
        return (*self.additive, *self.allowed)

    @property
    def operands(self) -> tuple[Operand, ...]:
        """Return all tensors with axes that change the scores."""
        others = (*(factor.operand for factor in self.factors), self.sinks)
        return (*(term.operand for term in self.terms), *(x for x in others if isinstance(x, Operand)))


@dataclass(frozen=True, kw_only=True, eq=False)
class ReadLse:
    """The logsumexp of a site, where something reads it.

    node: where it is read.
    dims: its dimensions in the site's atoms.
    is_part: its gradient is minus delta (merging.py).
    """

    node: fx.Node
    dims: Dims
    is_part: bool = False


@dataclass(frozen=True, kw_only=True, eq=False)
class SiteReads:
    """Tensors that a kernel can read instead of the model's q, k and v; found by recover.

    narrow: the dtype of q and k above a cast to the dtype that the model multiplies them in (upcasts.py).
    stored: k and v, if an FP8 cache holds both.
    latent: the tensors of which k and v are linear maps, or why they nearly are and are not (latent.py).
    """

    narrow: torch.dtype | None = None
    stored: tuple[Stored, Stored] | None = None
    latent: Latent | Reason | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class KeptOutputs:
    """Reasons why a kernel that saves an output has to return a copy; None where it need not (saved.py)."""

    out: str | None = None
    lse: str | None = None


@dataclass(kw_only=True, eq=False)
class Match:
    """An attention that a pattern recognised, in nodes of the mirror.

    pattern: the pattern's name.
    anchor: the node that matching began with.
    first, out: the first and the last node of the model's computation.
    out_dims: the output's dimensions in the site's atoms.
    q, k, v: the operands.
    axes: the site's axes.
    scores: the changes to the scores.
    covered: the nodes from `first` to `out`. The scores live nowhere else, so writes to them concern the site alone.
    returns_weights: as in AttentionSpec.
    decomposed: as in AttentionSpec.
    lse: the logsumexp; None where nothing reads it.
    reads: what kernels can read instead.
    kept: which outputs need copies.
    notes: further notes on the site for the report.
    scope: as Region.kernels.
    """

    pattern: str
    anchor: fx.Node
    first: fx.Node
    out: fx.Node
    out_dims: Dims
    q: Operand
    k: Operand
    v: Operand
    axes: SiteAxes
    scores: SiteScores
    covered: frozenset[fx.Node] = frozenset()
    returns_weights: bool = False
    decomposed: bool = False
    lse: ReadLse | None = None
    reads: SiteReads = field(default_factory=SiteReads)
    kept: KeptOutputs = KeptOutputs()
    notes: tuple[str, ...] = ()
    scope: frozenset[str] | None = None

    @property
    def outputs(self) -> tuple[fx.Node, ...]:
        """Return the nodes that others read: the output, and the logsumexp where that is read."""
        return (self.out,) if self.lse is None else (self.out, self.lse.node)


@dataclass(frozen=True, kw_only=True, slots=True)
class Keyless:
    """The result of a row without keys.

    allowed: whether a pair takes part; None if only the site's tensor tells.
    numbers: the row's scores over (b, h, q, k), whose softmax weighs the keys; None: all keys weigh the same.
    highest: the highest number that masks.
    through: the scores have a gradient there, since the number was added to them. partly: some of them, since it replaced others.
    own: why only the model's own numbers, added as they are, give the row; None if the fields above give it.
    by_tensor: a row has keys where the highest number of the site's tensor is 0. Any other row is the softmax over that tensor.

    Ranks that share a sequence leave such a row 0, and say so: the mean would be one over all ranks.
    """

    allowed: Expr | None
    highest: float
    numbers: Expr | None = None
    through: bool = False
    partly: bool = False
    own: str | None = None
    by_tensor: bool = False


@dataclass(kw_only=True, eq=False)
class Site:
    """A match on its way through the passes.

    match: what was recognised.
    module: the path of the model's module.
    source: the line of the model, if it is known.
    spec: the site's description for lowerings; set by recover.
    added, allowed: the terms that the match had before recovery.
    condition: when a pair of a query and a key takes part, if that could be read. What else the terms add is `spec.score.proved`.
    keyless: the result of a query without keys, where the kernel's 0 is not right (keyless.py).
    loads: each name in `condition` -> its tensor.
    score_loads: each name in `spec.score.proved` -> its tensor.
    decision: the lowering that was chosen; set by select.
    evidence: the measurement that gave lowerings their order; set by select.
    estimate: the time that the site takes, where that is known; set by select.
    faster: a package that is not installed and would be faster, where that is known; set by select.
    new_out: the Dynamo node that took the old output's place; set by lower.
    copies: copies that were put into the graph.
    notes: further notes on the site for the report.
    texts: of the leaf ops that compute it, by which their failures are recognised; set by lower.
    forwards: the Dynamo nodes that compute its output with its lse, each as one op; set by lower.
    """

    match: Match
    module: str
    source: str | None = None
    spec: AttentionSpec | None = None
    added: tuple[Term, ...] = ()
    allowed: tuple[Term, ...] = ()
    condition: Expr | None = None
    keyless: Keyless | None = None
    loads: Mapping[str, Version] = field(default_factory=dict)
    score_loads: Mapping[str, Version] = field(default_factory=dict)
    decision: Decision | None = None
    evidence: Evidence | None = None
    estimate: Estimate | None = None
    faster: Faster | None = None
    new_out: fx.Node | None = None
    copies: list[Copy] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    texts: tuple[str, ...] = ()
    forwards: tuple[fx.Node, ...] = ()
