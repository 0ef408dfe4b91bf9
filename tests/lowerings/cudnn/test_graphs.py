from __future__ import annotations

import dataclasses
import threading
from typing import Any

import pytest

from attn_compiler.lowerings.cudnn import frontend as cudnn_frontend, graphs, plan as cudnn_call
from attn_compiler.lowerings.cudnn.graphs import UIDS, BuiltPlan, Laid, PlanKey, Plans
from attn_compiler.lowerings.cudnn.plan import CudnnCall
from attn_compiler.reasons.errors import CudnnRefused
from attn_compiler.spec.target import cudnn_version
from tests.lowerings.cudnn.recording_frontend import Alignment, DataType, Frontend, Graph, NotSupported

CALL = CudnnCall(scale=0.125, needs_grad=True)


def bshd(batch: int = 2, heads: int = 4, seqlen: int = 64, head_dim: int = 32) -> Laid:
    return Laid.of((batch, heads, seqlen, head_dim), (seqlen * heads * head_dim, head_dim, heads * head_dim, 1))


def inputs(call: CudnnCall = CALL, **changed: Laid) -> dict[str, Laid]:
    given = {"q": bshd(), "k": bshd(heads=2, seqlen=48), "v": bshd(heads=2, seqlen=48, head_dim=16)} | changed
    return given | ({"bias": Laid.contiguous((1, 4, 64, 48))} if call.bias else {})


def forward_key(call: CudnnCall = CALL, **changes: Any) -> PlanKey:
    told = {"dtype": "bfloat16", "inputs": inputs(call), "device": 0, "cudnn": 91900}
    return graphs.forward_key(call, **told | changes)


def backward_key(call: CudnnCall = CALL, **changes: Any) -> PlanKey:
    given = inputs(call)
    told: dict[str, Any] = {"dtype": "bfloat16", "inputs": given, "device": 0, "cudnn": 91900}
    told["gradients"] = {f"grad_{name}": given[name] for name in "qkv"}
    return graphs.backward_key(call, **told | changes)


def graph_of(key: PlanKey) -> Graph:
    frontend = Frontend()
    graphs.build(frontend, key, lambda: 0.0, handle=7)
    return frontend.graphs[0]


# ---- what cuDNN is told -----------------------------------------------------------------------------------------------


def test_the_forward_is_told_shapes_and_strides_as_they_are() -> None:
    graph = graph_of(forward_key())
    tensors = graph.named(UIDS)
    assert set(tensors) == {"q", "k", "v", "out", "lse"}
    assert (tensors["q"].dim, tensors["q"].stride) == ([2, 4, 64, 32], [8192, 32, 128, 1])
    assert (tensors["v"].dim, tensors["v"].stride) == ([2, 2, 48, 16], [1536, 16, 32, 1])
    assert (tensors["out"].dim, tensors["out"].stride) == ([2, 4, 64, 16], [4096, 16, 64, 1])
    assert (tensors["lse"].dim, tensors["lse"].stride) == ([2, 4, 64, 1], [256, 64, 1, 1])
    assert (tensors["q"].data_type, tensors["out"].data_type) == (DataType.BFLOAT16, DataType.BFLOAT16)
    assert tensors["lse"].data_type is DataType.FLOAT
    assert tensors["out"].is_output
    assert tensors["lse"].is_output
    assert graph.machine == {
        "io_data_type": DataType.BFLOAT16,
        "intermediate_data_type": DataType.FLOAT,
        "compute_data_type": DataType.FLOAT,
        "handle": 7,
    }
    assert graph.steps == [
        "validate",
        "build_operation_graph",
        "create_execution_plans",
        "check_support",
        "build_plans",
    ]


def test_no_statistics_without_gradients() -> None:
    graph = graph_of(forward_key(CudnnCall(scale=0.5)))
    assert set(graph.named(UIDS)) == {"q", "k", "v", "out"}
    assert (graph.told["generate_stats"], graph.told["attn_scale"]) == (False, 0.5)


def test_the_backward_takes_the_gradient_as_the_output_lies() -> None:
    graph = graph_of(backward_key())
    tensors = graph.named(UIDS)
    assert set(tensors) == {"q", "k", "v", "out", "lse", "grad_out", "grad_q", "grad_k", "grad_v"}
    assert tensors["grad_out"].stride == tensors["out"].stride == [4096, 16, 64, 1]
    assert [tensors[n].is_output for n in ("grad_q", "grad_k", "grad_v", "out")] == [True, True, True, False]
    assert graph.told["use_deterministic_algorithm"] is False
    assert graph_of(backward_key(CudnnCall(scale=1.0, needs_grad=True, deterministic=True))).told[
        "use_deterministic_algorithm"
    ]


@pytest.mark.parametrize("make", [forward_key, backward_key])
@pytest.mark.parametrize(
    ("call", "left", "right", "alignment"),
    [
        (CudnnCall(scale=1.0, needs_grad=True), None, None, Alignment.TOP_LEFT),
        (CudnnCall(scale=1.0, needs_grad=True, right=0), None, 0, Alignment.TOP_LEFT),
        (CudnnCall(scale=1.0, needs_grad=True, right=0, from_end=True), None, 0, Alignment.BOTTOM_RIGHT),
        # A window of 0 back, the query's own position alone, is a bound of 1: cuDNN's left bound is exclusive.
        (CudnnCall(scale=1.0, needs_grad=True, left=0, right=0), 1, 0, Alignment.TOP_LEFT),
        (CudnnCall(scale=1.0, needs_grad=True, left=1023, right=0), 1024, 0, Alignment.TOP_LEFT),
        (CudnnCall(scale=1.0, needs_grad=True, left=5, right=7, from_end=True), 6, 7, Alignment.BOTTOM_RIGHT),
    ],
)
def test_bands(make: Any, call: CudnnCall, left: int | None, right: int | None, alignment: Alignment) -> None:
    told = graph_of(make(call)).told
    assert (told["diagonal_band_left_bound"], told["diagonal_band_right_bound"]) == (left, right)
    assert told["diagonal_alignment"] is alignment
    assert "use_padding_mask" not in told


@pytest.mark.parametrize("make", [forward_key, backward_key])
def test_lengths(make: Any) -> None:
    graph = graph_of(make(CudnnCall(scale=1.0, needs_grad=True, lengths=True)))
    told, tensors = graph.told, graph.named(UIDS)
    assert told["use_padding_mask"] is True
    assert (told["seq_len_q"].name, told["seq_len_kv"].name) == ("lengths_q", "lengths")
    assert (tensors["lengths"].dim, tensors["lengths"].data_type) == ([2, 1, 1, 1], DataType.INT32)


@pytest.mark.parametrize("make", [forward_key, backward_key])
def test_dropout(make: Any) -> None:
    p, seed, offset = graph_of(make(CudnnCall(scale=1.0, needs_grad=True, dropout_p=0.125))).told["dropout"]
    assert (p, seed.name, offset.name) == (0.125, "seed", "offset")
    assert (seed.dim, seed.data_type) == ([1, 1, 1, 1], DataType.INT64)


def test_bias_and_sinks_and_their_gradients() -> None:
    call = CudnnCall(scale=1.0, needs_grad=True, bias=True, bias_grad=True, sinks=True, sinks_grad=True)
    told = graph_of(forward_key(call)).told
    assert (told["bias"].name, told["sink_token"].dim) == ("bias", [1, 4, 1, 1])
    told = graph_of(backward_key(call)).told
    assert (told["dBias"].name, told["dBias"].dim) == ("grad_bias", [1, 4, 64, 48])
    assert {"sink_token", "dSink_token"}.isdisjoint(told), "lse has the sinks in it, and their gradient is the graph's"
    frozen = graph_of(backward_key(CudnnCall(scale=1.0, needs_grad=True, bias=True, sinks=True))).told
    assert "dBias" not in frozen


def test_addresses_go_in_the_order_of_the_uids() -> None:
    call = CudnnCall(scale=1.0, needs_grad=True, lengths=True, bias=True)
    plan = graphs.build(Frontend(workspace=99), backward_key(call), iter((1.0, 1.5)).__next__)
    names = "q k v out lse grad_out grad_q grad_k grad_v bias lengths_q lengths".split()
    assert plan.order == tuple(names)
    assert (plan.workspace, plan.engine, plan.milliseconds) == (99, "engine0", 500.0)


def test_a_size_of_one_has_no_stride_of_its_own() -> None:
    odd = Laid.of((1, 16, 2048, 64), (7, 64, 1152, 1))
    assert odd == Laid.of((1, 16, 2048, 64), (2359296, 64, 1152, 1)) == Laid.of((1, 16, 2048, 64), (0, 64, 1152, 1))
    assert odd.strides == (2048 * 1152, 64, 1152, 1)
    assert Laid.of((1, 1, 1, 8), (3, 3, 3, 1)).strides == (8, 8, 8, 1)
    assert Laid.of((2, 2, 2, 8), (1, 2, 4, 8)).strides == (1, 2, 4, 8)


# ---- keys and counts --------------------------------------------------------------------------------------------------


def plans(frontend: Frontend) -> Plans:
    return Plans(lambda key: graphs.build(frontend, key, lambda: 0.0))


def other_strides(laid: Laid) -> Laid:
    return dataclasses.replace(laid, strides=(laid.strides[0] * 2, *laid.strides[1:]))


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": "float16"},
        {"device": 1},
        {"cudnn": 92100},
        *({"inputs": inputs(**{name: other_strides(inputs()[name])})} for name in "qkv"),
        *(
            {"inputs": inputs(q=bshd(**{axis: size}))}
            for axis, size in (("batch", 3), ("seqlen", 72), ("head_dim", 40))
        ),
        {"inputs": inputs(v=bshd(heads=2, seqlen=48, head_dim=24))},
    ],
)
def test_whatever_a_plan_depends_on_is_in_its_key(changes: dict[str, Any]) -> None:
    frontend = Frontend()
    known = plans(frontend)
    assert known.get(forward_key()) is known.get(forward_key())
    known.get(forward_key(**changes))
    assert len(frontend.graphs) == known.counts.forward == 2


@pytest.mark.parametrize("make", [forward_key, backward_key])
@pytest.mark.parametrize("field", sorted({f.name for f in dataclasses.fields(CudnnCall)} - {"bias_grad"}))
def test_every_field_of_a_call_is_in_the_key(make: Any, field: str) -> None:
    value: Any = getattr(CALL, field)
    changed = dataclasses.replace(CALL, **{field: not value if isinstance(value, bool) else (value or 0) + 0.5})
    assert make(changed) != make()


def test_a_gradient_of_the_bias_is_in_the_key() -> None:
    with_bias = dataclasses.replace(CALL, bias=True)
    assert backward_key(with_bias) != backward_key(dataclasses.replace(with_bias, bias_grad=True))


def test_gradients_strides_are_in_the_key() -> None:
    given = inputs()
    gradients = {f"grad_{name}": given[name] for name in "qkv"}
    changed = gradients | {"grad_k": other_strides(given["k"])}
    assert backward_key(gradients=changed) != backward_key(gradients=gradients)


def test_forward_and_backward_are_counted_apart_and_late_ones_are_known() -> None:
    known = plans(Frontend())
    with known.at_compile_time():
        known.get(forward_key())
        with known.at_compile_time():
            known.get(backward_key())
        assert known.counts.late == 0
    known.get(forward_key())
    known.get(forward_key(device=1))
    assert (known.counts.forward, known.counts.backward, known.counts.late, known.counts.builds) == (2, 1, 1, 3)


def test_compiling_in_one_thread_does_not_excuse_another() -> None:
    known = plans(Frontend())
    with known.at_compile_time():
        other = threading.Thread(target=known.get, args=(forward_key(),))
        other.start()
        other.join()
    assert known.counts.late == 1


def test_threads_that_ask_at_once_share_one_build() -> None:
    frontend = Frontend()
    known, together = plans(frontend), threading.Barrier(8)

    def ask() -> None:
        together.wait()
        known.get(forward_key())

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(frontend.graphs) == 1


# ---- refusals ---------------------------------------------------------------------------------------------------------


MESSAGE = (
    "[cudnn_frontend] Error: No valid engine configs for ______\n"
    '{"engineId":0,"smVersion":900}\n'
    "Warning: CUDNN_STATUS_NOT_SUPPORTED; Reason: head dim is odd at: d % 8\n"
    "Warning: CUDNN_STATUS_NOT_SUPPORTED; Reason: ptr->isSupported()\n"
)


@pytest.mark.parametrize("step", ["validate", "create_execution_plans", "check_support", "build_plans"])
@pytest.mark.parametrize("error", [NotSupported, RuntimeError])
def test_cudnns_own_message_is_kept_in_one_line(step: str, error: type[Exception]) -> None:
    frontend = Frontend(errors={step: error(MESSAGE)})
    with pytest.raises(CudnnRefused) as refused:
        graphs.build(frontend, forward_key(), lambda: 0.0)
    assert refused.value.said == "No valid engine configs for ______ (head dim is odd at: d % 8)"


def test_other_errors_are_not_taken_for_refusals() -> None:
    with pytest.raises(ZeroDivisionError):
        graphs.build(Frontend(errors={"validate": ZeroDivisionError()}), forward_key(), lambda: 0.0)


def test_what_was_refused_is_not_tried_again_and_not_counted() -> None:
    frontend = Frontend(errors={"check_support": NotSupported("no")})
    known = plans(frontend)
    for _ in range(2):
        with pytest.raises(CudnnRefused, match="no"):
            known.get(forward_key())
    assert (len(frontend.graphs), known.counts.builds) == (1, 0)


def test_a_message_may_be_empty() -> None:
    assert graphs.in_one_line("") == "no message"


# ---- FP8 --------------------------------------------------------------------------------------------------------------

FP8_FORWARD = CudnnCall(scale=0.125, right=0, needs_grad=True, fp8="forward")
FP8_BACKWARD = CudnnCall(scale=0.125, right=0, needs_grad=True, fp8="backward")
E4M3, E5M2, FLOAT = DataType.FP8_E4M3, DataType.FP8_E5M2, DataType.FLOAT


def test_the_forward_in_fp8_reads_and_writes_it_with_one_scale_a_tensor() -> None:
    graph = graph_of(forward_key(FP8_FORWARD, dtype="float8_e4m3fn"))
    tensors = graph.named(UIDS)
    assert set(tensors) == {"q", "k", "v", "out", "lse", *cudnn_call.SCALES["forward"]}
    assert {tensors[name].data_type for name in ("q", "k", "v", "out")} == {E4M3}
    assert {tensors[name].data_type for name in ("lse", *cudnn_call.SCALES["forward"])} == {FLOAT}
    assert tensors["descale_q"].dim == tensors["scale_out"].stride == [1, 1, 1, 1]
    told = graph.told
    assert (told["scale_s"].name, told["scale_o"].name, told["descale_v"].name) == ("scale_s", "scale_out", "descale_v")
    assert (told["right_bound"], told["left_bound"], told["generate_stats"]) == (0, None, True)
    assert [(x.is_output, x.data_type) for x in graph.largest] == [(False, FLOAT)] * 2


def test_without_gradients_no_statistics_in_fp8() -> None:
    graph = graph_of(forward_key(CudnnCall(scale=1.0, fp8="forward"), dtype="float8_e4m3fn"))
    assert "lse" not in graph.named(UIDS)
    assert graph.told["generate_stats"] is False


def test_the_backward_in_fp8_has_gradients_of_their_own_format() -> None:
    graph = graph_of(backward_key(FP8_BACKWARD, dtype="float8_e4m3fn"))
    tensors = graph.named(UIDS)
    assert {tensors[name].data_type for name in ("q", "k", "v", "out")} == {E4M3}
    assert {tensors[f"grad_{name}"].data_type for name in ("q", "k", "v", "out")} == {E5M2}
    told = graph.told
    names = {"descale_o": "descale_out", "descale_dO": "descale_grad_out", "descale_dP": "descale_ds"}
    names |= {
        "scale_dP": "scale_ds",
        "scale_dQ": "scale_grad_q",
        "scale_dK": "scale_grad_k",
        "scale_dV": "scale_grad_v",
    }
    assert {name: told[name].name for name in names} == names
    assert (told["stats"].name, told["o"].name, told["dO"].name) == ("lse", "out", "grad_out")


def test_lengths_in_fp8() -> None:
    call = dataclasses.replace(FP8_FORWARD, lengths=True)
    told = graph_of(forward_key(call, dtype="float8_e4m3fn")).told
    assert told["use_padding_mask"] is True
    assert told["seq_len_kv"].name == "lengths"


@pytest.mark.parametrize(
    "call", [FP8_FORWARD, FP8_BACKWARD, CudnnCall(scale=1.0, needs_grad=True, lengths=True, fp8="forward")]
)
def test_the_frontend_takes_the_graph_in_fp8(call: CudnnCall) -> None:
    frontend = cudnn_frontend._names(pytest.importorskip("cudnn", reason="needs the extra: pip install -e '.[cudnn]'"))
    if not cudnn_version():
        pytest.skip("this torch brings no cuDNN")
    square = {name: bshd(heads=heads, head_dim=128) for name, heads in (("q", 4), ("k", 2), ("v", 2))}
    told: dict[str, Any] = {"dtype": "float8_e4m3fn", "inputs": square}
    if call.fp8 == "backward":
        key = backward_key(call, **told, gradients={f"grad_{n}": square[n] for n in "qkv"})
    else:
        key = forward_key(call, **told)
    graph, _ = graphs.make_graph(frontend, key, sm_version=90, sm_count=132)
    graph.validate()
    graph.build_operation_graph()


# ---- the real frontend ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "call",
    [
        CALL,
        CudnnCall(scale=1.0, needs_grad=True, left=5, right=0),
        CudnnCall(scale=1.0, needs_grad=True, right=0, from_end=False, lengths=True),
        CudnnCall(scale=1.0, needs_grad=True, bias=True, bias_grad=True),
        CudnnCall(scale=1.0, needs_grad=True, sinks=True, sinks_grad=True),
        CudnnCall(scale=1.0, needs_grad=True, dropout_p=0.125),
        CudnnCall(scale=1.0, needs_grad=True, deterministic=True),
    ],
)
@pytest.mark.parametrize("make", [forward_key, backward_key])
def test_the_frontend_takes_the_graph(make: Any, call: CudnnCall) -> None:
    """As far as it goes without a GPU: its own rules, and the descriptors of cuDNN's library."""
    frontend = cudnn_frontend._names(pytest.importorskip("cudnn", reason="needs the extra: pip install -e '.[cudnn]'"))
    if not cudnn_version():
        pytest.skip("this torch brings no cuDNN")
    square = {name: bshd(heads=heads) for name, heads in (("q", 4), ("k", 2), ("v", 2))}
    square |= {"bias": Laid.contiguous((1, 4, 64, 64))} if call.bias else {}
    gradients = {"gradients": {f"grad_{n}": square[n] for n in "qkv"}} if make is backward_key else {}
    graph, names = graphs.make_graph(frontend, make(call, inputs=square, **gradients), sm_version=90, sm_count=132)
    graph.validate()
    graph.build_operation_graph()
    assert names == tuple(sorted(names, key=UIDS.__getitem__))


def test_a_plan_is_data() -> None:
    plan = BuiltPlan(graph=None, order=("q",), workspace=1, engine="e", milliseconds=2.0)
    assert dataclasses.asdict(plan)["order"] == ("q",)
