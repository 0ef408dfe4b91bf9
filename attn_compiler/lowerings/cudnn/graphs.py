"""cuDNN graphs and plans from a `CudnnCall` and the tensors' shapes and strides: built once for each distinct key, and counted.

The frontend that builds them is an argument: a test gives one that only records. Tensors are known by name and have one uid each, so that
a plan is executed with a list of addresses. dims are always logical (B, H, S, D); strides tell their order in memory.

cuDNN's left bound is exclusive: a window that reaches `left` keys back is left + 1. Its right bound is inclusive.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from attn_compiler.lowerings.cudnn.plan import FP8_GRADIENT_DTYPE, SCALES, CudnnCall
from attn_compiler.lowerings.cudnn.takes import NAMES
from attn_compiler.lowerings.shared.ops.leaf_ops import output_strides
from attn_compiler.reasons.errors import CudnnRefused

Shape = tuple[int, ...]

#: each tensor's uid; a plan takes addresses in the order of these
UIDS = {
    name: uid
    for uid, name in enumerate(
        (
            *"q k v out lse grad_out grad_q grad_k grad_v bias grad_bias sinks lengths_q lengths seed offset".split(),
            *dict.fromkeys((*SCALES["forward"], *SCALES["backward"])),
        ),
        1,
    )
}
_DTYPES = {**NAMES, "float8_e4m3fn": "FP8_E4M3", "float8_e5m2": "FP8_E5M2"}
_OTHER_DTYPES = {
    "lse": "FLOAT",
    "sinks": "FLOAT",
    "lengths_q": "INT32",
    "lengths": "INT32",
    "seed": "INT64",
    "offset": "INT64",
} | {name: "FLOAT" for names in SCALES.values() for name in names}
_ONE = (1, 1, 1, 1)
#: the frontend's names of scales, where they differ
_SCALE_NAMES = {
    "scale_out": "scale_o",
    "descale_out": "descale_o",
    "descale_grad_out": "descale_dO",
    "descale_ds": "descale_dP",
    "scale_ds": "scale_dP",
    "scale_grad_q": "scale_dQ",
    "scale_grad_k": "scale_dK",
    "scale_grad_v": "scale_dV",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Laid:
    """Shape and strides of one tensor, in elements. The stride of an axis of size one means nothing, and gets a fixed value."""

    shape: Shape
    strides: Shape

    @property
    def words(self) -> str:
        return f"{self.shape} in strides of {self.strides}"

    @staticmethod
    def of(shape: Shape, strides: Shape) -> Laid:
        """Set the strides of all axes of size one as if these were the outermost ones; a last axis of size one gets stride 1."""
        sizes = list(zip(shape, strides, strict=True))
        span = max((size * stride for size, stride in sizes if size > 1), default=1)
        first = [stride if size > 1 else span for size, stride in sizes[:-1]]
        return Laid(shape=tuple(shape), strides=(*first, strides[-1] if shape[-1] > 1 else 1))

    @staticmethod
    def contiguous(shape: Shape) -> Laid:
        strides, step = [], 1
        for size in reversed(shape):
            strides.append(step)
            step *= size
        return Laid.of(shape, tuple(reversed(strides)))


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanKey:
    """Everything that a plan depends on. tensors: (name, shape and strides) of all that are (B, H, S, D), inputs and outputs.

    device: the GPU's index. cudnn: cuDNN's version.
    """

    call: CudnnCall
    backward: bool
    dtype: str
    tensors: tuple[tuple[str, Laid], ...]
    device: int
    cudnn: int

    @property
    def laid(self) -> dict[str, Laid]:
        return dict(self.tensors)


@dataclass(frozen=True, kw_only=True, slots=True)
class BuiltPlan:
    """A built plan. order: names of the tensors in the order in which `graph` takes their addresses. workspace: bytes.

    engine: cuDNN's name of the kernel. milliseconds: spent on building it.
    """

    graph: Any
    order: tuple[str, ...]
    workspace: int
    engine: str
    milliseconds: float


@dataclass
class Counts:
    """Numbers of built plans. late: those built by an op's call, and not while a graph was compiled."""

    forward: int = 0
    backward: int = 0
    late: int = 0

    @property
    def builds(self) -> int:
        return self.forward + self.backward


class Plans:
    """The plans of a process, by key. Refusals are kept too: a graph is tried once. tell(key, plan, is_late) is called for each built
    plan."""

    def __init__(
        self, build: Callable[[PlanKey], BuiltPlan], tell: Callable[[PlanKey, BuiltPlan, bool], None] | None = None
    ) -> None:
        self._build = build
        self._tell = tell
        self._lock = threading.Lock()
        self._known: dict[PlanKey, BuiltPlan | CudnnRefused] = {}
        self._compiling = threading.local()
        self.counts = Counts()

    def get(self, key: PlanKey) -> BuiltPlan:
        """Return the plan, built if there is none yet. Raises CudnnRefused."""
        with self._lock:
            found = self._known.get(key)
            if found is None:
                found = self._known[key] = self._built(key)
        if isinstance(found, CudnnRefused):
            raise CudnnRefused(said=found.said)
        return found

    @contextmanager
    def at_compile_time(self) -> Iterator[None]:
        """Count plans built inside as not late."""
        before = getattr(self._compiling, "on", False)
        self._compiling.on = True
        try:
            yield
        finally:
            self._compiling.on = before

    def _built(self, key: PlanKey) -> BuiltPlan | CudnnRefused:
        try:
            plan = self._build(key)
        except CudnnRefused as refusal:
            return refusal
        kind = "backward" if key.backward else "forward"
        setattr(self.counts, kind, getattr(self.counts, kind) + 1)
        is_late = not getattr(self._compiling, "on", False)
        self.counts.late += is_late
        if self._tell is not None:
            self._tell(key, plan, is_late)
        return plan


# ---- shapes -------------------------------------------------------------------------------------------------------


def forward_key(call: CudnnCall, *, dtype: str, inputs: Mapping[str, Laid], device: int, cudnn: int) -> PlanKey:
    """Return the key of a forward plan. inputs: q, k, v and, if the call has one, bias."""
    tensors = {**inputs, **_outputs(inputs)}
    return PlanKey(call=call, backward=False, dtype=dtype, tensors=tuple(tensors.items()), device=device, cudnn=cudnn)


def backward_key(
    call: CudnnCall, *, dtype: str, inputs: Mapping[str, Laid], gradients: Mapping[str, Laid], device: int, cudnn: int
) -> PlanKey:
    """Return the key of a backward plan. inputs: as for the forward. gradients: grad_q, grad_k, grad_v. The output's gradient has the
    output's strides."""
    outputs = _outputs(inputs)
    grad_bias = {"grad_bias": Laid.contiguous(inputs["bias"].shape)} if call.bias_grad else {}
    tensors = {**inputs, **outputs, "grad_out": outputs["out"], **gradients, **grad_bias}
    return PlanKey(call=call, backward=True, dtype=dtype, tensors=tuple(tensors.items()), device=device, cudnn=cudnn)


def _outputs(inputs: Mapping[str, Laid]) -> dict[str, Laid]:
    """Return the outputs as `ops.empty_outputs` makes them: BSHD in memory, and lse (B, Hq, Sq) with a last axis of one, which cuDNN
    counts."""
    batch, heads, seqlen_q, _ = inputs["q"].shape
    head_dim = inputs["v"].shape[3]
    return {
        "out": Laid.of((batch, heads, seqlen_q, head_dim), output_strides(heads, seqlen_q, head_dim)),
        "lse": Laid(shape=(batch, heads, seqlen_q, 1), strides=(heads * seqlen_q, seqlen_q, 1, 1)),
    }


# ---- graphs -------------------------------------------------------------------------------------------------------


@dataclass
class _Graph:
    """One graph while it is built, with the frontend's names. fe: the frontend's module."""

    fe: Any
    graph: Any
    key: PlanKey

    def __post_init__(self) -> None:
        self.laid = self.key.laid
        self.used: list[str] = []

    @property
    def call(self) -> CudnnCall:
        return self.key.call

    def input(self, name: str) -> Any:
        self.used.append(name)
        laid = self.laid_of(name)
        return self.graph.tensor(
            name=name, dim=list(laid.shape), stride=list(laid.strides), data_type=self.dtype(name), uid=UIDS[name]
        )

    def output(self, tensor: Any, name: str) -> None:
        self.used.append(name)
        laid = self.laid_of(name)
        tensor.set_output(True).set_uid(UIDS[name]).set_data_type(self.dtype(name))
        tensor.set_dim(list(laid.shape)).set_stride(list(laid.strides))

    def laid_of(self, name: str) -> Laid:
        batch, heads = self.laid["q"].shape[:2]
        if name == "sinks":
            return Laid(shape=(1, heads, 1, 1), strides=(heads, 1, 1, 1))
        if name in ("lengths_q", "lengths"):
            return Laid(shape=(batch, 1, 1, 1), strides=(1, 1, 1, 1))
        if name in ("seed", "offset") or name in SCALES[self.call.fp8]:
            return Laid(shape=_ONE, strides=_ONE)
        return self.laid[name]

    def dtype(self, name: str) -> Any:
        usual = FP8_GRADIENT_DTYPE if self.call.fp8 and name.startswith("grad_") else self.key.dtype
        return getattr(self.fe.data_type, _OTHER_DTYPES.get(name, _DTYPES[usual]))

    def attention(self) -> None:
        if self.call.fp8:
            self._fp8()
        elif self.key.backward:
            self._backward()
        else:
            self._forward()

    def _forward(self) -> None:
        sinks = {"sink_token": self.input("sinks")} if self.call.sinks else {}
        out, lse = self.graph.sdpa(
            name="attention",
            q=self.input("q"),
            k=self.input("k"),
            v=self.input("v"),
            generate_stats=self.call.needs_grad,
            **self._shared(),
            **sinks,
        )
        self.output(out, "out")
        if self.call.needs_grad:
            self.output(lse, "lse")

    def _backward(self) -> None:
        call = self.call
        # lse includes the sinks, and so does every weight.
        grad_bias = {"dBias": self.input("grad_bias")} if call.bias_grad else {}
        gradients = self.graph.sdpa_backward(
            name="attention_backward",
            q=self.input("q"),
            k=self.input("k"),
            v=self.input("v"),
            o=self.input("out"),
            dO=self.input("grad_out"),
            stats=self.input("lse"),
            use_deterministic_algorithm=call.deterministic,
            **self._shared(),
            **grad_bias,
        )
        for tensor, name in zip(gradients, ("grad_q", "grad_k", "grad_v"), strict=True):
            self.output(tensor, name)

    def _fp8(self) -> None:
        """Add an FP8 node. The largest weight, output and gradients are not requested: they are no outputs then."""
        told = {_SCALE_NAMES.get(name, name): self.input(name) for name in SCALES[self.call.fp8]}
        told |= {name: self.input(name) for name in "qkv"} | self._shared(band="")
        if self.key.backward:
            told |= {"o": self.input("out"), "dO": self.input("grad_out"), "stats": self.input("lse")}
            told["use_deterministic_algorithm"] = self.call.deterministic
            made = self.graph.sdpa_fp8_backward(name="attention_fp8_backward", **told)
            names, largest = ["grad_q", "grad_k", "grad_v"], made[3:7]
        else:
            made = self.graph.sdpa_fp8(name="attention_fp8", generate_stats=self.call.needs_grad, **told)
            names, largest = ["out", "lse"] if self.call.needs_grad else ["out"], made[2:4]
        for tensor, name in zip(made, names, strict=False):
            self.output(tensor, name)
        for tensor in largest:
            tensor.set_dim(list(_ONE)).set_stride(list(_ONE)).set_data_type(self.fe.data_type.FLOAT)

    def _shared(self, band: str = "diagonal_band_") -> dict[str, Any]:
        """Return arguments that forward and backward share. band: prefix of the names of its two bounds."""
        call, alignment = self.call, self.fe.diagonal_alignment
        told: dict[str, Any] = {
            "attn_scale": call.scale,
            "diagonal_alignment": alignment.BOTTOM_RIGHT if call.from_end else alignment.TOP_LEFT,
            f"{band}left_bound": None if call.left is None else call.left + 1,
            f"{band}right_bound": call.right,
            "compute_data_type": self.fe.data_type.FLOAT,
        }
        if call.bias:
            told["bias"] = self.input("bias")
        if call.lengths:
            told |= {
                "use_padding_mask": True,
                "seq_len_q": self.input("lengths_q"),
                "seq_len_kv": self.input("lengths"),
            }
        if call.dropout_p:
            told["dropout"] = (call.dropout_p, self.input("seed"), self.input("offset"))
        return told


def make_graph(fe: Any, key: PlanKey, **machine: Any) -> tuple[Any, tuple[str, ...]]:
    """Return the frontend's complete graph, not built yet, and the names of its tensors in the order of their uids.

    machine: the frontend's description of the machine (a handle, or an architecture).
    """
    graph = fe.pygraph(
        io_data_type=getattr(fe.data_type, _DTYPES[key.dtype]),
        intermediate_data_type=fe.data_type.FLOAT,
        compute_data_type=fe.data_type.FLOAT,
        **machine,
    )
    made = _Graph(fe=fe, graph=graph, key=key)
    made.attention()
    return graph, tuple(sorted(made.used, key=UIDS.__getitem__))


def build(fe: Any, key: PlanKey, clock: Callable[[], float], **machine: Any) -> BuiltPlan:
    """Build a plan that can be executed. clock: seconds. Raises CudnnRefused with cuDNN's message."""
    begin = clock()
    try:
        graph, names = make_graph(fe, key, **machine)
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([fe.heur_mode.A, fe.heur_mode.FALLBACK])
        graph.check_support()
        graph.build_plans()
        order = _order(graph, names)
        engine, workspace = graph.get_plan_name_at_index(0), graph.get_workspace_size()
    # The frontend raises its own class for unsupported graphs, and RuntimeError for other failures.
    except (fe.cudnnGraphNotSupportedError, RuntimeError) as error:
        raise CudnnRefused(said=in_one_line(str(error))) from error
    milliseconds = 1000 * (clock() - begin)
    return BuiltPlan(graph=graph, order=order, workspace=workspace, engine=engine, milliseconds=milliseconds)


def _order(graph: Any, names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names in the order in which the built graph takes addresses. It leaves out tensors that it does not need."""
    # From 1.27 on the order is not known before a graph is executed, or this is called.
    graph._prepare_variant_pack_template()
    by_uid = {UIDS[name]: name for name in names}
    return tuple(by_uid[uid] for uid in graph._get_variant_pack_uids_sorted())


def in_one_line(message: str) -> str:
    """Return cuDNN's message without its list of engines, each of which repeats the first one's reason."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    reasons = [line.partition("Reason: ")[2] for line in lines if "Reason: " in line]
    first = lines[0].removeprefix("[cudnn_frontend] Error: ") if lines else "no message"
    return f"{first} ({reasons[0]})" if reasons else first
