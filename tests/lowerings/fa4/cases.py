"""What FlashAttention-4 is run on: every case of tests/cases.py that it takes, in half precision, and windows."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch

from attn_compiler.lowerings.fa4 import limits
from attn_compiler.lowerings.fa4.plan import Fa4Call
from attn_compiler.spec.attention import AttentionSpec
from attn_compiler.spec.masks import Alignment, Causal, Dense, MaskSpec, SlidingWindow
from attn_compiler.spec.target import Target
from tests import cases
from tests.cases import Case, Inputs

VERSION = "4.0.0b36"
H200 = Target.fake(flash_attn_4=VERSION)
_LONG = {"batch": 2, "seqlen_q": 423, "seqlen_kv": 423, "dtype": torch.bfloat16}
_GQA = {"heads_q": 8, "heads_kv": 2}


@dataclass(frozen=True, kw_only=True)
class Problem:
    """window: keys back and ahead, which a model hands over as a dense tensor that is proved to be one."""

    name: str
    case: Case
    window: tuple[int | None, int | None] | None = None


def _windowed(name: str, left: int | None, right: int | None, **further: object) -> Problem:
    case = Case(name=name, **{**_LONG, **further})  # type: ignore[arg-type]
    return Problem(name=name, case=case, window=(left, right))


WINDOWS = (
    _windowed("window_back", 63, 0),
    _windowed("window_both_sides", 20, 30, head_dim=128),
    _windowed("window_open_ahead", 50, None, head_dim=128),
    _windowed("window_open_back", None, 40),
    _windowed("window_of_one", 0, 0, head_dim=96),
    _windowed("window_beyond_all_keys", 4096, 0, head_dim=128, **_GQA),
    _windowed("window_gqa_sinks", 127, 0, sinks=True, **_GQA),
    _windowed("window_softcap_wide", 255, 0, softcap=2.0, head_dim=256, **_GQA),
)


def _half(case: Case) -> Problem:
    lowered = cases.lowered(case, "bfloat16", torch.bfloat16)
    return Problem(name=lowered.name, case=lowered)


def _more() -> tuple[Case, ...]:
    causal = {"causal": Alignment.TOP_LEFT, **_LONG}
    return (
        *(Case(name=f"long_{head_dim}", head_dim=head_dim, **causal, **_GQA) for head_dim in (64, 96, 128, 192, 256)),
        *(Case(name=f"full_{head_dim}", head_dim=head_dim, **_LONG) for head_dim in (96, 128, 192, 256)),
        Case(name="wide_192_128", head_dim=192, head_dim_v=128, **causal),
        Case(name="softcap_wide", head_dim=256, softcap=5.0, **causal),
        Case(name="sinks_full", sinks=True, head_dim=128, **_LONG),
        Case(name="sinks_empty_rows_from_the_end", sinks=True, causal=Alignment.BOTTOM_RIGHT, seqlen_q=300, seqlen_kv=200,
             dtype=torch.bfloat16),
        Case(name="float16", **{**causal, "dtype": torch.float16}, head_dim=128),
        Case(name="slice_128", layout="slice", head_dim=128, **causal),
        Case(name="sbhd_128", layout="sbhd", head_dim=128, **causal, **_GQA),
    )  # fmt: skip


def _taken(problem: Problem, *, needs_grad: bool = True) -> bool:
    return not limits.check_fa4(inputs(problem, device="cpu", needs_grad=needs_grad).spec_on_gpu, H200)


@dataclass(frozen=True, kw_only=True)
class Built(Inputs):
    """Inputs of a problem."""

    @property
    def spec_on_gpu(self) -> AttentionSpec:
        """The spec, as it is on a GPU."""
        return dataclasses.replace(self.spec, device="cuda")

    @property
    def operands(self) -> list[torch.Tensor]:
        """The leaf op's."""
        return [] if self.sinks is None else [self.sinks]

    def text(self, *, sm: int = 90, deterministic: bool = False, version: str = VERSION) -> str:
        """The leaf op's."""
        return Fa4Call(spec=self.spec_on_gpu, version=version, sm=sm, deterministic=deterministic).to_text()


def inputs(problem: Problem, *, device: str, needs_grad: bool = True, seed: int = 0) -> Built:
    """The tensors, and the spec that says what the window is."""
    made = cases.build(problem.case, device=device, needs_grad=needs_grad, seed=seed)
    fields = {f.name: getattr(made, f.name) for f in dataclasses.fields(made)}
    if problem.window is None:
        return Built(**fields)
    left, right = problem.window
    rows = torch.arange(problem.case.seqlen_q, device=device)[:, None]
    distance = torch.arange(problem.case.seqlen_kv, device=device) - rows
    allowed = torch.ones_like(distance, dtype=torch.bool)
    proved = []
    if left is not None:
        allowed &= distance >= -left
        proved.append(SlidingWindow(left=left, right=right if right != 0 else None))
    if right is not None:
        allowed &= distance <= right
        proved.append(Causal() if right == 0 else SlidingWindow(left=None, right=right))
    dense = Dense(shape=tuple(allowed[None, None].shape), dtype="bool")
    spec = dataclasses.replace(made.spec, mask=MaskSpec(kinds=tuple(proved), dense=dense))
    return Built(**{**fields, "mask": allowed[None, None], "spec": spec})


_ALL = (*WINDOWS, *(Problem(name=case.name, case=case) for case in _more()), *map(_half, cases.FLOAT32))
PROBLEMS: tuple[Problem, ...] = tuple(problem for problem in _ALL if _taken(problem))
#: those that are taken without gradients alone
FORWARDS: tuple[Problem, ...] = tuple(
    problem for problem in _ALL if problem not in PROBLEMS and _taken(problem, needs_grad=False)
)
