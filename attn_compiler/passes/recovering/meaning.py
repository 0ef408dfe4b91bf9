"""Prove the meaning of a site's masks and biases: read them as a condition over (b, h, q, k), mask kinds and score kinds.

added.py separates masks from biases. A condition must be exact; a bias need only be recognised.
"""

from __future__ import annotations

import math
import operator
import re
from dataclasses import dataclass, field, replace

import torch
from torch import fx

from attn_compiler import index_expr as ix
from attn_compiler.index_expr import Expr, Linear, Ranges
from attn_compiler.index_expr.dividing import divide
from attn_compiler.index_expr.ranges import LOADED_KEY
from attn_compiler.index_expr.reach import Reach
from attn_compiler.passes.graph import axes, mutation
from attn_compiler.passes.graph.axes import Dim
from attn_compiler.passes.graph.calls import target_name
from attn_compiler.passes.graph.mirror import Mirror
from attn_compiler.passes.graph.mutation import Version
from attn_compiler.passes.graph.site import Keyless, Match, Term
from attn_compiler.passes.recovering import (
    added,
    alternatives,
    chosen,
    elements,
    keyless,
    kinds,
    no_masks,
    reading,
    score_kinds,
    unproved,
)
from attn_compiler.passes.recovering.keyless import MaskStep
from attn_compiler.passes.recovering.packing import by_places
from attn_compiler.passes.recovering.reading import Reader, Unreadable
from attn_compiler.passes.spelling import fills
from attn_compiler.spec import added_scores, masks
from attn_compiler.spec.added_scores import ProvedScore
from attn_compiler.spec.chosen_keys import Chosen
from attn_compiler.spec.masks import Formula, MaskKind

#: characters of a formula in a reason
_MOST = 120

_INDICES = (kinds.B, kinds.H, kinds.Q, kinds.K)

#: note on scores · b + fill · (1 - b), unless each b was shown to be a truth value
_NUMBERS = "scores are multiplied by numbers that were not shown to be 0 and 1 (mask.bool().float() tells)"

#: Dynamo's name of a parameter or a buffer: l_self_modules_attn_modules_bias_parameters_table_
_PARAMETER = re.compile(r"(?:.*modules_(?P<module>\w+?)_)?(?:parameters|buffers)_(?P<name>\w+)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Meaning:
    """Proved meaning of masks and biases. condition: true where a pair is allowed; None if that could not be read.

    kinds: mask kinds. reason: why the mask, or a part of it, could not be read. added: why a bias that was read may be a mask.
    rest: the condition beside the kinds, if only the tensors that it loads could not be read.
    chosen: the only keys that a query may use, if they are given by indices.
    scores: kinds of all biases, if all are known. tensors: the tensor behind each name that `scores` loads from. along: for each
    term (added ones first), the letters of the indices along which its elements may differ. unusual: changes of the scores that
    have no kind (fills.py).
    keyless: the output of a query without keys; None if 0 is right, or if each query has keys (keyless.py).
    """

    condition: Expr | None = None
    kinds: tuple[MaskKind, ...] = ()
    reason: str | None = None
    rest: Formula | None = None
    chosen: Chosen | None = None
    added: str | None = None
    scores: tuple[ProvedScore, ...] = ()
    tensors: dict[str, Version] = field(default_factory=dict)
    along: tuple[str, ...] = ()
    unusual: tuple[str, ...] = ()
    keyless: Keyless | None = None

    @property
    def is_everything(self) -> bool:
        """True if nothing is masked and nothing is added."""
        return self.condition == ix.TRUE and not self.scores

    @property
    def is_causal_only(self) -> bool:
        """True if a causal mask is all that changes the scores."""
        is_all = self.reason is None and len(self.kinds) == 1
        return not self.scores and is_all and isinstance(self.kinds[0], masks.Causal)

    @property
    def words(self) -> str:
        return " ∧ ".join(kind.words for kind in self.kinds) or "true everywhere"


def of(mirror: Mirror, match: Match, reader: Reader) -> Meaning:
    """Read the masks and biases of a match. This never fails: an unreadable term comes back as its reason."""
    read = _Read(mirror, match, reader)
    for term in match.scores.additive:
        read.add(term)
    for term in match.scores.allowed:
        read.mask(term)
    return read.meaning()


def unread(match: Match, reason: str) -> Meaning:
    """Return the meaning of a match none of whose terms could be read."""
    return Meaning(
        reason=reason,
        along=tuple(term.along for term in match.scores.terms),
        unusual=(
            *(_NUMBERS for term in match.scores.allowed if term.by_numbers),
            *fills.unusual(match, {term.fill for term in match.scores.allowed}, Reach()),
        ),
    )


class _Read:
    """Meaning of one match, as far as it was read."""

    def __init__(self, mirror: Mirror, match: Match, reader: Reader) -> None:
        self._mirror = mirror
        self._match = match
        self._reader = reader
        self._ranges = elements.ranges(match, reader.longer)
        self._conditions: list[Expr] = []
        self._scores: list[ProvedScore] = []
        self._reasons: list[str] = []
        self._unread_masks: list[str] = []
        self._is_whole = True
        self._along: list[str] = []
        self._unread: dict[str, Version] = {}
        self._names: dict[str, str] = {}
        self._tensors: dict[str, Version] = {}
        self._fills: set[float] = set()
        self._unusual: set[str] = set()
        self._steps: list[tuple[int, MaskStep]] = []
        self._dtype = _dtype_of(match.first)
        self._reach = Reach()

    def add(self, term: Term) -> None:
        """Read an added tensor: a condition for its mask, and score kinds for the rest."""
        try:
            x = ix.as_float(self._element(term))
        except Unreadable as unreadable:
            self._reasons.append(str(unreadable))
            self._add_unread(term, may_shut_out=True)
            return
        within = self._known(x, term)
        found = added.split(x, term.weight, scores_up_to=fills.of_scores(self._match), within=within)
        self._reach = self._reach.plus(found.reach(within))
        rounded = _why_rounded(term, x, found)
        if rounded is not None:
            self._add_unread(term, may_shut_out=not self._masks_in_part(term, found, rounded))
            return
        self._conditions.append(found.allowed)
        self._fills |= found.fills
        if found.fills:
            added_up = ix.mul(x, ix.Const(float(term.weight))) if found.sums or len(found.fills) > 1 else None
            self._step(term, MaskStep(allowed=found.allowed, fills=found.fills, replaces=False, added=added_up))
        for kind in score_kinds.recognise(found.added):
            named = self._named(kind, term)
            if isinstance(kind, added_scores.Bias) and isinstance(named, added_scores.Bias):
                # A bias may mask or not, whatever other masks there are.
                version, is_learned = self._version(kind.tensor), named.requires_grad
                if not no_masks.is_none(self._mirror, self._match, version, kind.weight, is_learned=is_learned):
                    self._reasons.append(unproved.of_bias(version, self._origin(kind.tensor)))
                    named = replace(named, may_shut_out=True)
            self._scores.append(named)

    def _masks_in_part(self, term: Term, found: added.Split, rounded: str) -> bool:
        """Take the exact parts of an added tensor's condition: they must hold, whatever the rest is. False if that fails."""
        exact = kinds.exact(found.allowed)
        if not exact or found.sums or len(found.fills) != 1:
            self._reasons.append(rounded)
            return False
        self._conditions += exact
        self._fills |= found.fills
        self._step(term, MaskStep(allowed=None, fills=found.fills, replaces=False))
        self._unread_masks.append(rounded)
        return True

    def mask(self, term: Term) -> None:
        """Read a mask that has a truth value for each pair."""
        self._fills.add(term.fill)
        try:
            element = self._element(term)
            if term.by_numbers and not ix.is_truth(element):
                self._unusual.add(_NUMBERS)
            allowed = ix.as_bool(element)
        except Unreadable as unreadable:
            self._unusual |= {_NUMBERS} if term.by_numbers else set()
            self._unread_masks.append(str(unreadable))
            self._step(term, self._masking(None, term))
            return
        allowed = ix.invert(allowed) if term.inverted else allowed
        self._conditions += kinds.exact(allowed)
        if ix.is_exact(allowed):
            self._step(term, self._masking(allowed, term))
            return
        self._step(term, self._masking(None, term))
        rounded = next(part for part in kinds.conjuncts(allowed) if not ix.is_exact(part))
        self._unread_masks.append(
            f"{term.operand.node.name} compares numbers that are rounded: {ix.text(rounded, _MOST)}"
        )

    def meaning(self) -> Meaning:
        condition = ix.apply("and", *self._conditions)
        seqlen_q, seqlen_kv = _length(self._match.axes.query), _length(self._match.axes.key)
        found: tuple[MaskKind, ...] = ()
        read, rest = self._told_apart(condition)
        reason = next(iter(self._unread_masks), None) or self._why_not(rest)
        if seqlen_q is None or seqlen_kv is None:
            reason = reason or "a sequence length is no plain size"
        elif (many := alternatives.too_many(read)) is not None:
            reason = reason or many
        elif self._is_whole:
            # Each of these must hold, whatever else must.
            found = kinds.recognise(read, seqlen_q, seqlen_kv)
        if reason is None and not found:
            # A bias that may mask is one of the scores, so the mask kinds of the other terms stay complete.
            reason = next(iter(self._reasons), None)
        is_all = not self._unread_masks and not self._scores
        return Meaning(
            condition=condition if reason is None else None,
            kinds=found,
            reason=reason,
            rest=Formula(condition=rest) if found and is_all and rest != ix.TRUE else None,
            chosen=chosen.of(self._mirror, self._match, self._reader, kinds.conjuncts(condition))
            if self._is_whole
            else None,
            added=None if found or reason else unproved.why(self._scores),
            scores=score_kinds.joined(self._scores) if self._is_whole else (),
            tensors=self._tensors,
            along=tuple(self._along),
            unusual=(*self._unusual, *fills.unusual(self._match, self._fills, self._reach)),
            keyless=self._keyless(),
        )

    def _masking(self, allowed: Expr | None, term: Term) -> MaskStep:
        return MaskStep(allowed=allowed, fills=frozenset({term.fill}), replaces=term.replaces, again=term.again)

    def _step(self, term: Term, masking: MaskStep) -> None:
        self._steps.append((self._mirror.order(term.operand.used), masking))
        self._dtype = _dtype_of(term.operand.used) or self._dtype

    def _keyless(self) -> Keyless | None:
        """Return the output of a row without keys. None (0) if a sink takes all the weight."""
        if self._match.scores.sinks is not None:
            return None
        steps = [step for _, step in sorted(self._steps, key=operator.itemgetter(0))]
        if self._match.scores.is_causal:
            diagonal = ix.compare("<=", kinds.K, kinds.Q)
            steps.append(MaskStep(allowed=diagonal, fills=frozenset({-math.inf}), replaces=True))
        low = max((limit.low for limit in self._match.scores.limits), default=-math.inf)
        square = axes.same_size(axes.dim_size(self._match.axes.query), axes.dim_size(self._match.axes.key))
        dtype = self._dtype or torch.float32
        # Kernels of SDPA add the mask in float32.
        dtype = dtype if self._match.decomposed else torch.promote_types(dtype, torch.float32)
        return keyless.of(steps, dtype, self._ranges, square=square, low=low)

    def _known(self, x: Expr, term: Term) -> Ranges:
        """Ranges of the indices and sizes in x, but not of what it loads."""
        within = self._reader.within(x, term.operand.node, elements.indices(self._match, term.operand.dims))
        return {name: most for name, most in within.items() if not name.endswith(LOADED_KEY.format(""))}

    def _told_apart(self, condition: Expr) -> tuple[Expr, Expr]:
        """Split a condition into what was read and the parts that load an element per query and key. Both must hold."""
        parts = kinds.conjuncts(condition)
        said = by_places(ix.decide(ix.apply("and", *map(kinds.at_most, parts)), self._ranges), self._reader)
        return alternatives.fewer(ix.decide(said, self._ranges), self._ranges), ix.apply(
            "and", *(part for part in parts if kinds.load_of_pairs(part) is not None)
        )

    def _why_not(self, rest: Expr) -> str | None:
        """Return why the rest of a condition says nothing; None if it loads no element per query and key."""
        whole = kinds.load_of_pairs(rest)
        if whole is None:
            return None
        what = f"{self._origin(whole.tensor)}, and holds an element for each query and key"
        return f"{what}. Comparisons of positions, document numbers and truth values of keys are read, however they are joined"

    def _element(self, term: Term) -> Expr:
        self._along.append(term.along)
        at = elements.indices(self._match, term.operand.dims)
        try:
            read = self._reader.read_at(self._mirror.order(term.operand.used), term.operand.node, at)
            found = ix.decide(divide(read, self._ranges), self._ranges)
        except RecursionError as error:
            raise Unreadable(
                f"{term.operand.node.name} is made by more ops in a row than Python's stack can hold"
            ) from error
        self._along[-1] = "".join(index.name for index in _INDICES if ix.mentions(found, index))
        return found

    def _origin(self, name: str) -> str:
        """Return why nothing is known of the elements of a tensor."""
        version = self._version(name)
        too_large = self._reader.too_large.items()
        larger = next((why for known, why in too_large if self._version(known).node is version.node), None)
        if larger is not None:
            return f"{name} {larger}"
        if version.since is not None and version.since is not version.node:
            return f"{name} is written in place, by {version.since.name}"
        if name in self._reader.not_followed:
            return f"{name} is an input of a body (of a checkpoint, say), and can not be followed to where it was made"
        if version.node.op == "placeholder":
            return f"{name} is an input of the graph"
        return f"{name} was made {_how(version.node)}in a way that can not be read"

    # ---- scores ---------------------------------------------------------------------------------------------------

    def _add_unread(self, term: Term, *, may_shut_out: bool) -> None:
        """Record a tensor that can't be read as a Bias: it loads its own elements, and varies at most along its axes."""
        node = term.operand.node
        try:
            at = elements.indices(self._match, term.operand.dims)
        except Unreadable as unreadable:
            # The biases are not all known then.
            self._unread_masks.append(str(unreadable))
            self._is_whole = False
            return
        shape = elements.shape(self._match, elements.varies_along(self._match, term.operand))
        self._unread[node.name] = mutation.version(self._mirror, node, self._mirror.order(term.operand.used))
        bias = added_scores.Bias(tensor=node.name, at=at, shape=shape, weight=term.weight, may_shut_out=may_shut_out)
        self._scores.append(self._named(bias, term))

    def _named(self, kind: ProvedScore, term: Term) -> ProvedScore:
        """Return the kind with short names of its tensors, its shape, and whether it requires a gradient."""
        nodes = (self._version(name).node for name in score_kinds.tensors(kind))
        wants = self._requires_grad(term.operand.root) and any(map(self._requires_grad, nodes))
        if isinstance(kind, added_scores.Bias) and not kind.shape:
            kind = replace(kind, shape=elements.shape(self._match, kind.varies_along))
        renamed = score_kinds.renamed(kind, self._short)
        return score_kinds.with_gradient(renamed) if wants else renamed

    def _requires_grad(self, node: fx.Node) -> bool:
        """True if a node requires a gradient, by Dynamo's own value if there is one."""
        dynamo = self._mirror.dynamo_node(node)
        value = node.meta["val"] if dynamo is None else dynamo.meta["example_value"]
        return bool(value.requires_grad)

    def _short(self, name: str) -> str:
        """A name that equal layers share: a parameter's own, a node's without its number."""
        if name not in self._names:
            version = self._version(name)
            found = _PARAMETER.fullmatch(name)
            short = name if version.node.op == "placeholder" else re.sub(r"_\d+$", "", name)
            short = short if found is None else _parameter(found)
            while self._tensors.setdefault(short, version) != version:
                short += "'"
            self._names[name] = short
        return self._names[name]

    def _version(self, name: str) -> Version:
        return self._unread[name] if name in self._unread else self._reader.tensors[name]


def _why_rounded(term: Term, x: Expr, found: added.Split) -> str | None:
    """Return why an added tensor's condition, or its choice between values, is not exact; None if both are."""
    if not ix.is_exact(found.allowed):
        return f"{term.operand.node.name} masks by numbers that are rounded: {ix.text(found.allowed, _MOST)}"
    if not all(score_kinds.chooses_exactly(part.value) for part in found.added):
        return f"{term.operand.node.name} chooses by numbers that are rounded: {ix.text(x, _MOST)}"
    return None


def _dtype_of(node: fx.Node) -> torch.dtype | None:
    """Return the dtype of a node that computes floats, else None."""
    value = node.meta["val"]
    return value.dtype if isinstance(value, torch.Tensor) and value.dtype.is_floating_point else None


def _how(node: fx.Node) -> str:
    """Return the op of a node in words, and whether symbolic sizes may be the obstacle."""
    by = f"by {target_name(node)} " if isinstance(node.target, torch._ops.OpOverload) else ""
    return by + ("of symbolic sizes " if any(not s.is_Integer for s in axes.shape_exprs(reading.fake(node))) else "")


def _parameter(found: re.Match[str]) -> str:
    """Return a parameter's name, after its module's if it is `weight` or `bias`, which many modules have."""
    module, name = found["module"], found["name"]
    return f"{module}.{name}" if name in ("weight", "bias") and module and not module.isdigit() else str(name)


def _length(dim: Dim) -> Linear | None:
    expr = reading.size(axes.dim_size(dim))
    return None if expr is None else ix.linear(expr)
