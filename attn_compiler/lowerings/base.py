"""The contract of a lowering: one way to compute an attention site. To add one: a file here, a line in LOWERINGS, its test."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import fx

from attn_compiler.index_expr.on_nodes import NodeMaker
from attn_compiler.reasons.codes import Code
from attn_compiler.reasons.decisions import Reason
from attn_compiler.spec import dims
from attn_compiler.spec.attention import AttentionSpec, TensorSpec
from attn_compiler.spec.dtypes import HALF
from attn_compiler.spec.target import Target

#: what the name of an op ends with that hands on what other nodes computed, the first of its operands, and has a formula of autograd
GIVEN = "_given"
#: what the name of a leaf op ends with whose lse gets minus delta in place of a gradient (merging.py)
PART = "_part"

_TILE = re.compile(r"(\d+)x(\d+) w(\d+) s(\d+)(?: r(\d+))?( apart)?")

#: Lowerings that read what k and v are made of, and neither k nor v: the first ones for a site that has it.
OF_LATENT = ("decode_latent", "absorbed")

#: the lowering that leaves a site as the model has it
UNTOUCHED = "untouched"

#: Lowerings that read the filled part of a cache alone. To read all of it once more would cost more than they do.
OF_CACHE = ("decode", "decode_latent")

#: Lowerings that add a tensor's numbers to the scores as they are, and whose backward keeps the weights: the model's own in rows without
#: keys, too.
OF_NUMBERS = ("math", "reference")

#: Those whose forward has, if not their backward, beside numbers that leave a score its digits.
OF_NUMBERS_FORWARD = ("sdpa_cpu_flash", "sdpa_efficient", "sdpa_cudnn")

#: Lowerings in FP8: the first ones for a site that the user gave a recipe for, and for no other. The oracle is asked for by name.
FP8 = ("hopper_fp8", "triton_fp8", "cudnn_fp8", "reference_fp8")


@dataclass(frozen=True, kw_only=True, slots=True)
class LayoutDemand:
    """What a kernel needs of its q, k and v. The layout pass copies an operand only where its strides break this.

    last_stride_one: elements of one head are adjacent. alignment: bytes that every other stride must be a multiple of (1: any).
    zero_strides: an expanded (stride-0) axis is readable. farthest: elements that the stride of positions has at most (None: any).
    """

    last_stride_one: bool = True
    alignment: int = 1
    zero_strides: bool = True
    farthest: int | None = None

    def broken_by(self, tensor: TensorSpec) -> str | None:
        """What the kernel can't read in these strides; None if it can read them. An axis of size one has no stride to speak of."""
        *others, of_head = zip(tensor.strides, tensor.shape, strict=True)
        strides = [stride for stride, size in others if size != 1]
        last, last_size = of_head
        if self.last_stride_one and last_size != 1 and last != 1:
            return f"the kernel reads a head's elements side by side; their stride is {last}"
        if not self.zero_strides and (0 in strides or (last == 0 and last_size != 1)):
            return "the kernel can't read a repeated (stride 0) axis"
        positions = tensor.strides[-2]
        is_far = self.farthest is not None and isinstance(positions, int) and positions > self.farthest
        if is_far and tensor.shape[-2] != 1:
            return f"the kernel reads positions that are at most {self.farthest} elements apart; their stride is {positions}"
        element = torch.empty((), dtype=getattr(torch, tensor.dtype), device="meta").element_size()
        step = math.lcm(self.alignment, element) // element
        for stride in strides:
            if step > 1 and not dims.is_multiple(stride, step):
                return (
                    f"the kernel needs strides that are multiples of {self.alignment} bytes; one is {stride} elements"
                )
        return None


@dataclass(frozen=True, kw_only=True, slots=True)
class Tile:
    """One kernel's tile of the scores, queries × keys, and how it is compiled.

    apart: dk and dv have a pass each: five products instead of four, but half the accumulators.
    registers: the most that a thread takes. With fewer, more programs share a multiprocessor (65536 registers). None: the compiler decides.
    """

    queries: int
    keys: int
    warps: int
    stages: int
    apart: bool = False
    registers: int | None = None

    @property
    def words(self) -> str:
        """For people: "64x128 w8 s3"."""
        capped = "" if self.registers is None else f" r{self.registers}"
        return f"{self.queries}x{self.keys} w{self.warps} s{self.stages}{capped}" + (" apart" if self.apart else "")

    @classmethod
    def read(cls, words: str) -> Tile:
        """Inverse of `words`. Raises ValueError for anything else."""
        found = _TILE.fullmatch(words)
        if found is None:
            raise ValueError(f"{words!r} is no tile like '64x128 w8 s3', '64x64 w4 s3 r168' or '32x128 w8 s2 apart'")
        queries, keys, warps, stages = map(int, found.groups()[:4])
        registers = None if found[5] is None else int(found[5])
        return cls(queries=queries, keys=keys, warps=warps, stages=stages, registers=registers, apart=bool(found[6]))

    @property
    def launch_options(self) -> dict[str, int]:
        """What Triton's launch and compiler take."""
        capped = {} if self.registers is None else {"maxnreg": self.registers}
        return {"num_warps": self.warps, "num_stages": self.stages, **capped}


@dataclass(frozen=True, kw_only=True, slots=True)
class Tiles:
    """Tiles of the three kernels: forward, the gradient of q, and the gradients of k and v.

    grad_q: with tile lists it has the forward's keys, and all or a part of the forward's queries, because both walk the same lists.
    """

    forward: Tile
    grad_q: Tile
    grad_kv: Tile


@dataclass(frozen=True, kw_only=True)
class SizeOf:
    """Where a symbolic size is at hand: an axis of a tensor's node, or a node that is the number itself (axis None)."""

    node: fx.Node
    axis: int | None = None


@dataclass(frozen=True, kw_only=True)
class StoredNodes:
    """k and v as a cache in FP8 holds them, logical BHSD; k_scale, v_scale: (), float32, what they are multiplied by."""

    k: fx.Node
    v: fx.Node
    k_scale: fx.Node | None = None
    v_scale: fx.Node | None = None


@dataclass(frozen=True, kw_only=True)
class LatentNodes:
    """What k and v are made of.

    latent: (B, 1, Skv, rank).
    rope: (B, 1, Skv, p).
    weight_k: (Hq, nope, rank).
    weight_v: (Hq, Dv, rank).
    """

    latent: fx.Node
    rope: fx.Node | None
    weight_k: fx.Node
    weight_v: fx.Node


@dataclass(frozen=True, kw_only=True)
class Operands:
    """Dynamo-graph nodes of one site, in logical BHSD (see AttentionSpec); sinks is (Hq,).

    mask: the tensor of the spec's Dense mask or, without one, of its DenseBias; broadcasts to (B, Hq, Sq, Skv). Every lowering refuses a
        spec with both.
    loads, score_loads: the tensors that the spec's proved masks and scores read, by their names in the spec. Tensors that are out of reach
        (MaskSpec, ScoreSpec) are missing.
    sizes: the symbolic sizes in both, without those that are out of reach.
    stored: what the spec's `stored` describes.
    latent: what the spec's `latent` describes.
    has_keys: bool (B|1, Hq|1, Sq|1, 1), which queries have a key; where a kernel is to give the others the mean of v, and that was read.
    """

    q: fx.Node
    k: fx.Node
    v: fx.Node
    mask: fx.Node | None = None
    sinks: fx.Node | None = None
    loads: Mapping[str, fx.Node] = field(default_factory=dict)
    score_loads: Mapping[str, fx.Node] = field(default_factory=dict)
    sizes: Mapping[str, SizeOf] = field(default_factory=dict)
    stored: StoredNodes | None = None
    latent: LatentNodes | None = None
    has_keys: fx.Node | None = None


class Emitter(NodeMaker, Protocol):
    """Puts nodes into the Dynamo graph at the site. Every node gets its fake value, source line and module path."""

    @property
    def target(self) -> Target:
        """The machine that the site runs on: the one that it was decided for."""
        ...

    def note(self, text: str) -> None:
        """Tell people something of the site: it stands in the report."""
        ...

    def buffer(self, name: str, shape: tuple[int, ...]) -> tuple[fx.Node, fx.Node]:
        """A float32 tensor of the site's own that starts as zeros and lives as long as the compiled code: to be written in place, and
        what it held before the call, which recomputation sees too."""
        ...

    def once(self, key: Any, make: Callable[[], fx.Node]) -> fx.Node:
        """make(), or the node that it gave for an equal key before: what several sites of a graph need is made once."""
        ...

    def shared_mask(self, mask: fx.Node, dtype: torch.dtype) -> fx.Node:
        """`mask` as an additive tensor of `dtype` (bool True -> 0, False -> -inf), made once a graph however many sites share it."""
        ...


class Lowering(Protocol):
    """One way to compute a site. Stateless; decides from the spec and the target alone.

    A family's class inherits from this one, so that a question that it has nothing to say to has its answer here.
    """

    name: str

    def unavailable(self, target: Target) -> list[Reason]:
        """Every reason why this lowering can't run on that machine, whatever the site; empty means it can."""
        ...

    def cannot_package(self) -> list[Reason]:
        """Why what it emits can't be in an exported program, whose package runs where this package is not; empty where it is ATen's ops, or
        launches of Triton kernels that Inductor can compile."""
        rule = "what is in an exported program runs without this package"
        remedy = (
            "the Triton kernels and PyTorch's own serve exported programs; this one serves torch.compile(model, "
            "backend='attn_compiler')"
        )
        return [
            Reason(
                code=Code.PACKAGED,
                rule=rule,
                observed=f"{self.name} calls kernels of attn_compiler from Python",
                remedy=remedy,
            )
        ]

    def why_not(self, spec: AttentionSpec, target: Target) -> list[Reason]:
        """Every reason why this lowering can't or shouldn't serve the spec there; empty means yes. Builds and compiles nothing."""
        ...

    def cannot_build(self, spec: AttentionSpec, target: Target) -> list[Reason]:
        """What only building or compiling the kernels tells against the spec; empty means that they are ready, or need no building.

        `select` asks this last, of a lowering that it would choose. An answer may take seconds. The first call uses what was built.
        """
        return []

    def demand(self, spec: AttentionSpec) -> LayoutDemand:
        """What the kernel needs of the strides of q, k and v."""
        ...

    def gives_means(self, spec: AttentionSpec, target: Target) -> bool:
        """Whether `emit` heeds `spec.mask.means`, in the forward and backward."""
        return False

    def plan(self, spec: AttentionSpec, target: Target) -> Any:
        """All that is decided of a site that this lowering takes, as frozen data. The spec itself where nothing else is to be decided."""
        return spec

    def emit(self, emitter: Emitter, plan: Any, operands: Operands, /) -> fx.Node:
        """Insert the computation; returns the node of the output, logical (B, Hq, Sq, Dv), in any strides and in q's dtype.

        plan: what `plan` gave. Nothing is decided here.
        """
        ...

    def emit_with_lse(self, emitter: Emitter, plan: Any, operands: Operands, /) -> tuple[fx.Node, fx.Node]:
        """As `emit`, for a spec whose lse is read: the output, and (B, Hq, Sq) in float32, or in float64 for float64. -inf in a row
        without any allowed key."""
        raise TypeError(f"{self.name} gives no lse: its why_not refuses a spec whose lse is read")


def first_two(emitter: Emitter, outputs: fx.Node) -> tuple[fx.Node, fx.Node]:
    """The output and the lse of a leaf op."""
    return emitter.call(operator.getitem, outputs, 0), emitter.call(operator.getitem, outputs, 1)


def check_fp8_inputs(spec: AttentionSpec) -> list[Reason]:
    """q, k and v in half precision: what the model computes in float32 it wants to be more exact than that."""
    if spec.dtype in HALF:
        return []
    rule = "FP8 attention takes bfloat16 or float16"
    observed = f"q is {spec.dtype}: the attention runs in {spec.dtype.replace('float', 'fp')}, FP8 is ignored"
    return [
        Reason(
            code=Code.DTYPE,
            rule=rule,
            observed=observed,
            remedy="call model.bfloat16(), or compile under torch.autocast",
        )
    ]
