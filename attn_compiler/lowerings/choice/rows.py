"""One row of the order in which lowerings are asked: its conditions on machine and site, and its form in a TOML file."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from attn_compiler.lowerings.choice import shape_class
from attn_compiler.lowerings.choice.shape_class import ShapeClass
from attn_compiler.lowerings.shared.limits.common import LAST_SM
from attn_compiler.lowerings.shared.parts import site_parts
from attn_compiler.lowerings.shared.parts.site_parts import PartKind
from attn_compiler.spec import dims
from attn_compiler.spec.attention import AttentionSpec
from attn_compiler.spec.dtypes import HALF
from attn_compiler.spec.target import Target

#: PyTorch's kernels in the order in which it asks them (sdp_utils.cpp): usually, and where it prefers cuDNN
FLASH_FIRST = ("sdpa_flash", "sdpa_efficient", "sdpa_cudnn")
CUDNN_FIRST = ("sdpa_cudnn", "sdpa_flash", "sdpa_efficient")
#: PyTorch puts cuDNN first from 9.15.1 on (check_prefer_cudnn_attention in sdp_utils.cpp: "> 91500").
PREFERRED_CUDNN = 91_501
#: Fewer scores take less time than the launch of one of our kernels.
MANY_SCORES = 512 * 512
#: queries of a decode step, at most: one token, several guessed ones, a piece of a prompt
MOST_QUERIES = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class EvidenceRow:
    """An order of lowerings with its evidence, for some machines. Every field that is not None has to hold.

    sms: architectures from .. to, both included; None: the CPU.
    dtypes: of q, or of x.
    training: the call needs gradients.
    order: the lowerings, the first one first; none where the model's own computation stays.
    since: the date of the evidence.
    why: the evidence.
    measured: on such machines. Otherwise it is reasoning.
    """

    sms: tuple[int, int] | None
    dtypes: tuple[str, ...] | None = None
    training: bool | None = None
    order: tuple[str, ...]
    since: str
    why: str
    measured: bool = field(default=True, compare=False)

    def serves(self, target: Target, dtype: str, needs_grad: bool) -> bool:
        """Return whether the machine, the dtype and the mode are the row's."""
        of_machine = target.device == "cpu"
        if self.sms is not None:
            of_machine = target.device == "cuda" and self.sms[0] <= target.sm <= self.sms[1]
        return of_machine and (self.dtypes is None or dtype in self.dtypes) and self.training in (None, needs_grad)


@dataclass(frozen=True, kw_only=True, slots=True)
class Row(EvidenceRow):
    """The order for some machines and sites. Every field that is not None has to hold.

    cudnn: at least this version.
    avx512: as in Target.
    decomposed: as in AttentionSpec.
    upcast: q and k are float32, and the output is half precision.
    one_query: decode.
    most_queries: upper bound on the queries of every call.
    tensor: a dense mask or bias joins the scores.
    stored: a cache in FP8 holds k and v.
    dropout: some weights are dropped.
    least_scores, most_scores: bounds on seqlen_q · seqlen_kv.
    mask, band, grouped: as in ShapeClass.
    parts: the site has one of these.
    learned: a bias has a gradient.
    head_dims: both of the spec's are known and within them, bounds included; None is no upper bound.
    seqlens: the same of its lengths. An unknown length is never within bounds on a CPU. On a GPU it counts as shape_class.py says, here and
        in bounds on scores.
    least_elements, most_elements: bounds on the elements of q, which are known.
    times: of lowerings that ran on such sites, in multiples of the fastest one's; none where they were not timed together.
    """

    cudnn: int = 0
    avx512: bool | None = None
    decomposed: bool | None = None
    upcast: bool | None = None
    one_query: bool | None = None
    most_queries: int | None = None
    tensor: bool | None = None
    stored: bool | None = None
    dropout: bool | None = None
    least_scores: int | None = None
    most_scores: int | None = None
    mask: shape_class.Mask | None = None
    band: shape_class.Band | None = None
    grouped: bool | None = None
    parts: frozenset[PartKind] | None = None
    learned: bool | None = None
    head_dims: tuple[int, int | None] | None = None
    seqlens: tuple[int, int | None] | None = None
    least_elements: int | None = None
    most_elements: int | None = None
    # Equal evidence implies equal times.
    times: Mapping[str, float] = field(default_factory=dict, compare=False)

    def fits(self, spec: AttentionSpec, target: Target) -> bool:
        return (
            self.serves(target, spec.dtype, spec.needs_grad)
            and (self.sms is None or target.cudnn >= self.cudnn)
            and self.avx512 in (None, target.avx512)
            and self.decomposed in (None, spec.decomposed)
            and self.upcast in (None, spec.dtype == "float32" and spec.out_dtype in HALF)
            and self.one_query in (None, spec.seqlen_q == 1)
            and self._fits_queries(spec)
            and self.tensor in (None, spec.added_tensor is not None)
            and self.stored in (None, spec.stored is not None)
            and self.dropout in (None, spec.score.dropout_p > 0)
            and self._fits_lengths(spec)
            and self._fits_shape(shape_class.classify(spec))
            and (self.parts is None or bool(self.parts & site_parts.parts(spec).kinds))
            and self.learned in (None, site_parts.parts(spec).bias_grad)
        )

    def _fits_queries(self, spec: AttentionSpec) -> bool:
        """Return whether queries are few enough. An unknown number is few only if guards bound it."""
        most = dims.range_of(spec, spec.seqlen_q)[1]
        return self.most_queries is None or (most is not None and most <= self.most_queries)

    def _fits_lengths(self, spec: AttentionSpec) -> bool:
        if self.least_scores is None and self.most_scores is None and self.seqlens is None:
            return True
        shape = shape_class.classify(spec)
        if self.sms is None and shape.is_any:
            return False
        shorter, longer = shape.seqlens
        is_enough = (self.least_scores or 0) <= shorter * longer
        is_few = self.most_scores is None or shorter * longer <= self.most_scores
        return is_enough and is_few and _is_within(shape.seqlens, self.seqlens)

    def _fits_shape(self, shape: ShapeClass) -> bool:
        head_dims = None if shape.head_dim is None else (shape.head_dim, shape.head_dim)
        return (
            self.mask in (None, shape.mask)
            and self.band in (None, shape.band)
            and self.grouped in (None, shape.grouped)
            and _is_within(head_dims, self.head_dims)
            and (self.least_elements is None or (shape.elements or 0) >= self.least_elements)
            and (self.most_elements is None or 0 < (shape.elements or 0) <= self.most_elements)
        )


def _is_within(sizes: tuple[int, int] | None, bounds: tuple[int, int | None] | None) -> bool:
    """Return whether the smaller and the larger size are known to be within the bounds."""
    if bounds is None:
        return True
    first, last = bounds
    return sizes is not None and first <= sizes[0] and (last is None or sizes[1] <= last)


# ---- rows as priorities.toml writes them -------------------------------------------------------------------------------

OneRow = TypeVar("OneRow", bound=EvidenceRow)
_ORDERS = {"FLASH_FIRST": FLASH_FIRST, "CUDNN_FIRST": CUDNN_FIRST}
_WORDS: dict[str, Any] = {"yes": True, "no": False, "preferred": PREFERRED_CUDNN, "many": MANY_SCORES, "last": LAST_SM}


def _number(text: str) -> Any:
    return int(text) if text.isdigit() else _WORDS[text]


def _range(text: str) -> tuple[int, int | None]:
    """Parse "17..127", "512.." without an end, or one number."""
    first, dots, last = text.partition("..")
    return _number(first), _number(last or first) if last or not dots else None


_READ: Mapping[str, Callable[[str], Any]] = {
    "sm": _range,
    "head_dims": _range,
    "seqlens": _range,
    "lengths": _range,
    "dtypes": lambda text: HALF if text == "half" else tuple(text.split(",")),
    "parts": lambda text: frozenset(text.split(",")),
    "mask": str,
    "band": str,
    "recurrence": str,
}


def _selected(text: str) -> dict[str, Any]:
    """Return the fields of a row that "cpu" or "sm=90", and "field=value" give."""
    pairs = (word.partition("=") for word in text.split())
    found = {name: _READ.get(name, _number)(value) for name, _, value in pairs if name != "cpu"}
    return {"sms": found.pop("sm", None)} | found


def read(line: Mapping[str, Any], row: type[OneRow]) -> Iterator[OneRow]:
    """Return the rows of one entry: one for each line of its "for". Raises KeyError for an unknown word, and TypeError for an unknown
    field."""
    order = itertools.chain.from_iterable(_ORDERS.get(name, (name,)) for name in line["order"].split())
    shared = {**line, "order": tuple(order)}
    del shared["for"]
    texts = [line["for"]] if isinstance(line["for"], str) else line["for"]
    return (row(**_selected(text), **shared) for text in texts)
