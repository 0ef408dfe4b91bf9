"""The contract of a lowering: one way to compute an attention site. To add one: a folder, a line in homes.py, its test."""

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
from attn_compiler.reasons.decisions import Reason, refuse
from attn_compiler.spec import dims
from attn_compiler.spec.attention import AttentionSpec, TensorSpec
from attn_compiler.spec.dtypes import HALF
from attn_compiler.spec.target import Target

#: suffix of ops that return their first operands unchanged and carry an autograd formula for them (given_ops.py)
GIVEN = "_given"
#: suffix of leaf ops whose backward gets minus delta in place of the gradient of the lse (merging.py)
PART = "_part"

_TILE = re.compile(r"(\d+)x(\d+) w(\d+) s(\d+)(?: r(\d+))?( apart)?")

#: Lowerings that read the latent of k and v, and neither k nor v. They come first for a site that has a latent.
OF_LATENT = ("decode_latent", "absorbed")

#: the lowering that leaves a site as the model has it
UNTOUCHED = "untouched"

#: Lowerings that read only the filled part of a cache. Another pass over the whole cache would cost more than these kernels do.
OF_CACHE = ("decode", "decode_latent")

#: Lowerings that add a mask's numbers to the scores unchanged, and whose backward keeps the weights. In rows without keys they compute
#: what the model computes.
OF_NUMBERS = ("math", "reference")

#: Lowerings whose forward does so too, but not their backward, as long as the numbers are too small to round the scores away.
OF_NUMBERS_FORWARD = ("sdpa_cpu_flash", "sdpa_efficient", "sdpa_cudnn")

#: Lowerings in FP8. They come first for a site with a recipe, and serve no other. The reference is used only if asked for by name.
FP8 = ("hopper_fp8", "cudnn_fp8", "reference_fp8")


@dataclass(frozen=True, kw_only=True, slots=True)
class LayoutDemand:
    """The layout of q, k and v that a kernel needs. The layout pass copies an operand only where its strides break this demand.

    last_stride_one: elements of one head are adjacent. alignment: bytes that every other stride must be a multiple of (1: any).
    zero_strides: an expanded (stride-0) axis is readable. farthest: largest stride of positions, in elements (None: any).
    """

    last_stride_one: bool = True
    alignment: int = 1
    zero_strides: bool = True
    farthest: int | None = None

    def broken_by(self, tensor: TensorSpec) -> str | None:
        """Return why the kernel can't read these strides, or None if it can. The stride of an axis of size one does not count."""
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
    """The tile of scores, queries × keys, of one kernel, and its compile options.

    apart: dk and dv have a pass each: five products instead of four, but half the accumulators.
    registers: upper bound for a thread; with fewer, more programs share a multiprocessor (65536 registers). None: the compiler decides.
    """

    queries: int
    keys: int
    warps: int
    stages: int
    apart: bool = False
    registers: int | None = None

    @property
    def words(self) -> str:
        """Text for people: "64x128 w8 s3"."""
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
        """Options of Triton's launch and compiler."""
        capped = {} if self.registers is None else {"maxnreg": self.registers}
        return {"num_warps": self.warps, "num_stages": self.stages, **capped}


@dataclass(frozen=True, kw_only=True, slots=True)
class Tiles:
    """Tiles of the three kernels: forward, the gradient of q, and the gradients of k and v.

    grad_q: with tile lists it has the forward's keys, and all or a part of the forward's queries, because both read the same lists.
    """

    forward: Tile
    grad_q: Tile
    grad_kv: Tile


@dataclass(frozen=True, kw_only=True)
class SizeOf:
    """Source of a symbolic size: an axis of a tensor's node, or the node of the number itself (axis None)."""

    node: fx.Node
    axis: int | None = None


@dataclass(frozen=True, kw_only=True)
class StoredNodes:
    """k and v as an FP8 cache holds them, logical BHSD. k_scale, v_scale: (), float32, factors that restore the values."""

    k: fx.Node
    v: fx.Node
    k_scale: fx.Node | None = None
    v_scale: fx.Node | None = None


@dataclass(frozen=True, kw_only=True)
class LatentNodes:
    """The latent and the weights that k and v are computed from.

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
    stored: the tensors that the spec's `stored` describes.
    latent: the tensors that the spec's `latent` describes.
    has_keys: bool (B|1, Hq|1, Sq|1, 1), True for queries with a key. Present where the kernel has to give all other queries the mean of v,
        and this condition was recovered.
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
    """Inserts nodes into the Dynamo graph at the site. Every node gets its fake value, source line and module path."""

    @property
    def target(self) -> Target:
        """The machine that the site was decided for, and runs on."""
        ...

    def note(self, text: str) -> None:
        """Add a remark on the site to the report."""
        ...

    def buffer(self, name: str, shape: tuple[int, ...]) -> tuple[fx.Node, fx.Node]:
        """Make a float32 buffer of zeros that lives as long as the compiled code. Returns it, to be written in place, and its content
        before the call, which recomputation sees too."""
        ...

    def once(self, key: Any, make: Callable[[], fx.Node]) -> fx.Node:
        """Return make(), or the node that make() gave for an equal key before. Sites of a graph share nodes this way."""
        ...

    def shared_mask(self, mask: fx.Node, dtype: torch.dtype) -> fx.Node:
        """Return `mask` as an additive tensor of `dtype` (bool True -> 0, False -> -inf), made once a graph however many sites share it."""
        ...


class Lowering(Protocol):
    """One way to compute a site. Stateless; decides from the spec and the target alone. Families inherit it, and override its defaults."""

    name: str

    def unavailable(self, target: Target) -> list[Reason]:
        """Return every reason why this lowering can't run on that machine, whatever the site. Empty: it can."""
        ...

    def cannot_package(self) -> list[Reason]:
        """Return why emitted nodes can't be in an exported program, which runs without this package. Empty for lowerings that emit only
        ATen ops or launches of Triton kernels that Inductor can compile."""
        rule = "what is in an exported program runs without this package"
        remedy = (
            "the Triton kernels and PyTorch's own serve exported programs; this one serves torch.compile(model, "
            "backend='attn_compiler')"
        )
        return refuse(Code.PACKAGED, rule, f"{self.name} calls kernels of attn_compiler from Python", remedy)

    def why_not(self, spec: AttentionSpec, target: Target) -> list[Reason]:
        """Return every reason why this lowering can't or shouldn't serve the spec there. Empty: it can. Builds and compiles nothing."""
        ...

    def cannot_build(self, spec: AttentionSpec, target: Target) -> list[Reason]:
        """Return the reasons that only building or compiling the kernels reveals. Empty: they are ready, or need no building.

        `select` asks this last, of a lowering that it would choose. An answer may take seconds. The first call uses the built kernels.
        """
        return []

    def demand(self, spec: AttentionSpec) -> LayoutDemand:
        """Return the layout of q, k and v that the kernel needs."""
        ...

    def gives_means(self, spec: AttentionSpec, target: Target) -> bool:
        """Return whether `emit` honours `spec.mask.means`, in the forward and backward."""
        return False

    def reads_pairs(self, spec: AttentionSpec, target: Target) -> bool:
        """Return whether a mask or bias is read that has an element for each pair of a query and a key."""
        return spec.has_pairs

    def plan(self, spec: AttentionSpec, target: Target) -> Any:
        """Return all decisions for a site that this lowering takes, as frozen data: the spec itself if there are no others."""
        return spec

    def emit(self, emitter: Emitter, plan: Any, operands: Operands, /) -> fx.Node:
        """Insert the computation. Returns the node of the output, logical (B, Hq, Sq, Dv), in any strides and in q's dtype.

        plan: the result of `plan`. Nothing is decided here.
        """
        ...

    def emit_with_lse(self, emitter: Emitter, plan: Any, operands: Operands, /) -> tuple[fx.Node, fx.Node]:
        """Insert the computation for a spec whose lse is read. Returns the output as `emit` does, and the lse: (B, Hq, Sq) in float32, or
        in float64 for float64, and -inf in a row without any allowed key."""
        raise TypeError(f"{self.name} gives no lse: its why_not refuses a spec whose lse is read")


class Anywhere(Lowering):
    """Base of what runs on any machine, and reads q, k and v in any layout."""

    def unavailable(self, target: Target) -> list[Reason]:
        return []

    def demand(self, spec: AttentionSpec) -> LayoutDemand:
        return LayoutDemand(last_stride_one=False)


def first_two(emitter: Emitter, outputs: fx.Node) -> tuple[fx.Node, fx.Node]:
    """Return the output and the lse of a leaf op."""
    return emitter.call(operator.getitem, outputs, 0), emitter.call(operator.getitem, outputs, 1)


def check_fp8_inputs(spec: AttentionSpec) -> list[Reason]:
    """Refuse q, k and v that are not in half precision: a model that computes in float32 wants more accuracy than FP8 has."""
    if spec.dtype in HALF:
        return []
    rule = "FP8 attention takes bfloat16 or float16"
    observed = f"q is {spec.dtype}: the attention runs in {spec.dtype.replace('float', 'fp')}, FP8 is ignored"
    return refuse(Code.DTYPE, rule, observed, "call model.bfloat16(), or compile under torch.autocast")
