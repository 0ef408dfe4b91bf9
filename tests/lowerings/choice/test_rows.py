"""Rows of the table: their evidence, and where none was measured."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from attn_compiler import index_expr
from attn_compiler.lowerings import by_name
from attn_compiler.lowerings.choice import evidence, fp8_speed, head_parts, hopper_added, in_order, priorities
from attn_compiler.lowerings.choice.measured import Table
from attn_compiler.lowerings.choice.rows import Row
from attn_compiler.lowerings.shared.parts import site_parts as parts
from attn_compiler.options.options import Options
from attn_compiler.passes.writing.select import decide
from attn_compiler.spec.attention import AttentionSpec, SizeRange, TensorSpec
from attn_compiler.spec.masks import Causal, Dense, Flag, KeyPadding, MaskSpec, SlidingWindow
from attn_compiler.spec.scores import ScoreSpec, Sinks, Softcap
from attn_compiler.spec.target import Target
from benchmarks import select_cases
from tests.lowerings.choice import cost
from tests.lowerings.choice.test_shape_class import PYTORCHS, WITH_TENSOR, spec_of
from tests.lowerings.golden_decisions import of_any_length
from tests.lowerings.specs import CAUSAL as PLAIN_CAUSAL, bias, dense, make_spec

# Which sites a row of the order is for.
H200 = Target.fake()
ROW = Row(sms=(90, 90), order=("triton",), since="2026-11-23", why="a test")


@pytest.mark.parametrize(
    ("bounds", "spec", "fits"),
    [
        ({}, {}, True),
        ({"dtypes": ("float16",)}, {}, False),
        ({"training": True}, {"needs_grad": True}, True),
        ({"training": True}, {"needs_grad": False}, False),
        ({"most_queries": 16}, {"seqlen_q": 16}, True),
        ({"most_queries": 16}, {"seqlen_q": 17}, False),
        ({"most_queries": 16}, {"seqlen_q": "s0"}, False),
        ({"most_queries": 16}, {"seqlen_q": "s0", "ranges": (SizeRange(size="s0", least=2, most=16),)}, True),
        ({"least_scores": 64 * 64}, {"seqlen_q": 64, "seqlen_kv": 64}, True),
        ({"least_scores": 64 * 64}, {"seqlen_q": 64, "seqlen_kv": 63}, False),
        ({"most_scores": 64 * 64}, {"seqlen_q": 64, "seqlen_kv": 65}, False),
        ({"least_scores": 4096 * 128}, {"seqlen_q": "s0"}, True),
        ({"least_scores": 4096 * 128 + 1}, {"seqlen_q": "s0"}, False),
        ({"least_scores": 513 * 128}, {"seqlen_q": "s0", "ranges": (SizeRange(size="s0", least=2, most=512),)}, False),
        ({"seqlens": (64, 511)}, {"seqlen_q": 64, "seqlen_kv": 511}, True),
        ({"seqlens": (64, 511)}, {"seqlen_q": 63, "seqlen_kv": 511}, False),
        ({"seqlens": (64, 511)}, {"seqlen_q": 64, "seqlen_kv": 512}, False),
        ({"seqlens": (64, None)}, {"seqlen_q": 64, "seqlen_kv": 1 << 20}, True),
        ({"seqlens": (64, None)}, {"seqlen_kv": "s0"}, True),
        ({"seqlens": (1024, 4095)}, {"seqlen_q": "s0", "seqlen_kv": "s0"}, False),
        ({"seqlens": (4096, None)}, {"seqlen_q": "s0", "seqlen_kv": "s0"}, True),
        ({"mask": "full"}, {}, True),
        ({"mask": "padding"}, {}, False),
        ({"parts": frozenset({"bias", "mask"})}, {"mask": dense(2, 1, 128, 128)}, True),
        ({"parts": frozenset({"bias", "mask"})}, {}, False),
    ],
)
def test_every_field_that_is_said_has_to_hold(bounds: dict[str, Any], spec: dict[str, Any], fits: bool) -> None:
    made = dataclasses.replace(
        make_spec(**{k: x for k, x in spec.items() if k != "ranges"}), ranges=spec.get("ranges", ())
    )
    assert dataclasses.replace(ROW, **bounds).fits(made, H200) is fits


@pytest.mark.parametrize("bounds", [{"least_scores": 1}, {"most_scores": 1 << 40}, {"seqlens": (1, None)}])
def test_on_a_cpu_a_length_that_is_not_known_is_within_no_bounds(bounds: dict[str, Any]) -> None:
    row, cpu = dataclasses.replace(ROW, sms=None, **bounds), Target.fake(device="cpu")
    assert row.fits(make_spec(device="cpu"), cpu)
    assert not row.fits(make_spec(device="cpu", seqlen_kv="s0"), cpu)


@pytest.mark.parametrize(
    ("sms", "machine", "fits"),
    [
        ((90, 90), Target.fake(sm=90), True),
        ((90, 90), Target.fake(sm=89), False),
        ((80, 90), Target.fake(sm=80), True),
        (None, Target.fake(device="cpu"), True),
        (None, Target.fake(), False),
        ((90, 90), Target.fake(device="cpu"), False),
    ],
)
def test_the_machine(sms: tuple[int, int] | None, machine: Target, fits: bool) -> None:
    assert dataclasses.replace(ROW, sms=sms).fits(make_spec(), machine) is fits


def test_a_newer_cudnn_than_there_is() -> None:
    assert not dataclasses.replace(ROW, cudnn=H200.cudnn + 1).fits(make_spec(), H200)
    assert dataclasses.replace(ROW, cudnn=H200.cudnn).fits(make_spec(), H200)


# A file of measured rows is read as a class says what its columns are.
@dataclass(frozen=True, kw_only=True)
class _Row:
    name: str
    pass_: str
    seqlen: int
    tflops: float
    training: bool
    backward: bool | None


def _table(folder: Path, *lines: str) -> Table[_Row]:
    path = folder / "rows.csv"
    path.write_text("\n".join(("name,pass,seqlen,tflops,training,backward", *lines)))
    return Table(path, _Row)


def test_columns_are_fields(tmp_path: Path) -> None:
    table = _table(tmp_path, "a,forward,8192,1.5,yes,", "b,backward,1,2,no,no")
    assert table.columns == ("name", "pass", "seqlen", "tflops", "training", "backward")
    assert table.rows() == (
        _Row(name="a", pass_="forward", seqlen=8192, tflops=1.5, training=True, backward=None),
        _Row(name="b", pass_="backward", seqlen=1, tflops=2.0, training=False, backward=False),
    )


def test_the_file_is_read_once(tmp_path: Path) -> None:
    table = _table(tmp_path, "a,forward,8192,1.5,yes,")
    assert table.rows() is table.rows()


def test_a_word_that_is_no_answer_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(KeyError, match="maybe"):
        _table(tmp_path, "a,forward,8192,1.5,maybe,").rows()


@pytest.mark.parametrize("module", [fp8_speed, head_parts, hopper_added, in_order], ids=lambda module: module.__name__)
def test_files_of_the_package_have_the_columns_of_their_class(module: object) -> None:
    table: Table[object] = module.TABLE  # type: ignore[attr-defined]
    assert tuple(table.path.read_text().splitlines()[0].split(",")) == table.columns
    assert table.rows()


# What is said of a choice.
CAUSAL = MaskSpec(kinds=(Causal(),), flag=Flag.CALLED)


def _spec(batch: int = 2, seqlen: int | str = 8192, mask: MaskSpec = CAUSAL, **others: object) -> AttentionSpec:
    size = seqlen if isinstance(seqlen, int) else 1
    q = TensorSpec(shape=(batch, 16, seqlen, 128), strides=(16 * size * 128, size * 128, 128, 1), dtype="bfloat16")
    spec = AttentionSpec(q=q, k=q, v=q, mask=mask, score=ScoreSpec(scale=0.1), device="cuda", out_dtype="bfloat16")
    return dataclasses.replace(spec, **others)  # type: ignore[arg-type]


def test_the_row_that_decides_is_the_evidence() -> None:
    found, row = evidence.evidence(_spec(), H200), priorities.row_of(_spec(), H200)
    assert found is not None
    assert row is not None
    assert (found.order, found.why, found.since) == (row.order, row.why, row.since)
    assert (found.measured, found.length) == (True, None)


def test_lengths_that_are_not_known_are_said() -> None:
    found = evidence.evidence(_spec(seqlen="s0"), H200)
    assert found is not None
    assert found.length == "any, chosen as for 4096"
    # A CPU's rows do not count them as any number.
    on_cpu = evidence.evidence(_spec(seqlen="s0", device="cpu"), Target.fake(device="cpu"))
    assert on_cpu is not None
    assert on_cpu.length is None


def test_a_machine_that_no_row_knows_has_no_evidence() -> None:
    assert evidence.evidence(_spec(), Target.fake(sm=30)) is None


def test_milliseconds_are_work_by_measured_speed() -> None:
    found = evidence.estimate(_spec(), H200, "hopper")
    speeds = {
        row.lowering: row.tflops
        for row in fp8_speed.TABLE.rows()
        if (row.mask, row.head_dim_to, row.seqlen, row.training) == ("causal", 128, 8192, False)
        and not row.grouped
        and not row.scaling
    }
    # Two products of 8192 x 8193 / 2 pairs, 128 numbers each, for 2 x 16 heads.
    work = 2 * 2 * 128 * (8192 * 8193 / 2) * 32
    assert found is not None
    assert found.milliseconds == pytest.approx(1e3 * work / speeds["hopper"] / 1e12)
    assert (found.other, found.since) == ("sdpa_cudnn", "2026-11-22")
    assert found.other_milliseconds == pytest.approx(1e3 * work / speeds["sdpa_cudnn"] / 1e12)
    assert found.gained == pytest.approx(1e3 * work / 1e12 * (1 / speeds["sdpa_cudnn"] - 1 / speeds["hopper"]))


def test_a_backward_is_counted() -> None:
    one, both = (evidence.estimate(_spec(needs_grad=grad), H200, "hopper") for grad in (False, True))
    assert one is not None
    assert both is not None
    assert both.milliseconds > 3 * one.milliseconds


def test_pytorchs_kernel_computes_all_pairs_beside_a_window() -> None:
    """So half the length takes a quarter of the time, where ours takes half."""
    dense = Dense(shape=(1, 1, 8192, 8192), dtype="bool")
    window = MaskSpec(kinds=(SlidingWindow(left=1023, right=0),), dense=dense)
    long, short = (evidence.estimate(_spec(seqlen=s, mask=window), H200, "hopper") for s in (8192, 4096))
    assert long is not None
    assert short is not None
    assert long.other_milliseconds is not None
    assert short.other_milliseconds is not None
    assert long.other_milliseconds / short.other_milliseconds == pytest.approx(4, rel=0.1)
    assert long.milliseconds / short.milliseconds < 2.6


def test_pytorchs_own_kernel_and_the_models_own_code_have_nothing_to_be_held_against() -> None:
    for spec, lowering in ((_spec(), "sdpa_cudnn"), (_spec(decomposed=True), "hopper")):
        found = evidence.estimate(spec, H200, lowering)
        assert found is not None
        assert (found.other, found.other_milliseconds, found.gained) == (None, None, None)


_PADDING = KeyPadding(
    condition=index_expr.as_bool(index_expr.Load("m", (index_expr.Index("b"), index_expr.Index("k")), "int"))
)


@pytest.mark.parametrize(
    ("spec", "target", "lowering"),
    [
        (_spec(), Target.fake(sm=80), "hopper"),
        (_spec(), H200, "untouched"),
        (_spec(seqlen="s0"), H200, "hopper"),
        (_spec(seqlen=128 * 1024), H200, "hopper"),
        (_spec(seqlen=256), H200, "hopper"),
        (_spec(batch=1, seqlen=512), H200, "hopper"),
        (_spec(mask=MaskSpec(kinds=(_PADDING,), dense=Dense(shape=(2, 1, 1, 8192), dtype="bool"))), H200, "hopper"),
        (_spec(score=ScoreSpec(scale=0.1, dropout_p=0.1)), H200, "hopper"),
    ],
    ids="gpu lowering symbolic longer shorter few padded dropout".split(),
)
def test_what_was_not_measured_has_no_estimate(spec: AttentionSpec, target: Target, lowering: str) -> None:
    assert evidence.estimate(spec, target, lowering) is None


# What is chosen on machines that were not measured is what the model of cost says, and says so.
MACHINES = [80, 86, 89, 100, 103, 120]


def _sites() -> Iterator[AttentionSpec]:
    for name, case in select_cases.BY_NAME.items():
        if case.seqlen in (512, 2048, 8192) and name.startswith(WITH_TENSOR):
            for training in (False, True):
                yield spec_of(name, training)
                yield of_any_length(spec_of(name, training))
    sizes: dict[str, Any] = {"seqlen_q": 2048, "seqlen_kv": 2048}
    for head_dim in (64, 128, 256):
        for needs_grad in (False, True):
            made: dict[str, Any] = {**sizes, "head_dim": head_dim, "needs_grad": needs_grad}
            yield make_spec(mask=dense(2, 1, 2048, 2048), **made)
            yield make_spec(mask=dense(2, 1, 1, 2048), dropout_p=0.1, **made)
            yield make_spec(changes=(bias(1, 8, 2048, 2048, requires_grad=False),), **made)


@pytest.mark.parametrize("sm", MACHINES)
def test_on_other_machines_a_tensor_goes_to_the_kernel_that_the_model_says_takes_least(sm: int) -> None:
    """But for dense masks that were not proved, on sm100: nearly a tie by the model, and cuDNN's is asked first."""
    target, compared = Target.fake(sm=sm), 0
    for spec in _sites():
        if sm // 10 == 10 and "mask" in parts.parts(spec).kinds:
            assert priorities.order(spec, target)[:2] == ("sdpa_cudnn", "triton")
            continue
        names = [name for name in ("triton", *PYTORCHS) if not by_name(name).why_not(spec, target)]
        found = decide(spec, target, Options()).lowering
        wanted, least = cost.cheapest(names, spec, target), cost.seconds(found, spec, target)
        assert wanted is not None
        assert least is not None
        words = (found, wanted, spec.mask.words, spec.q.shape, spec.score.words, spec.needs_grad)
        assert least <= 1.001 * (cost.seconds(wanted, spec, target) or 0), words
        compared += 1
    assert compared > 100


@pytest.mark.parametrize("sm", MACHINES)
@pytest.mark.parametrize("seqlen", [2048, "s0"])
@pytest.mark.parametrize("change", [Sinks(requires_grad=False), Softcap(cap=30.0)])
def test_sinks_and_softcap_are_left_to_nobody(sm: int, seqlen: int | str, change: Any) -> None:
    for needs_grad in (False, True):
        spec = make_spec(
            mask=PLAIN_CAUSAL, changes=(change,), seqlen_q=seqlen, seqlen_kv=seqlen, head_dim=128, needs_grad=needs_grad
        )
        assert decide(spec, Target.fake(sm=sm), Options()).lowering == "triton"


def test_rows_say_that_nothing_was_measured() -> None:
    assert not any(row.measured for row in priorities.group("unmeasured"))
    found = evidence.evidence(make_spec(mask=dense(2, 1, 1, 2048), seqlen_q=2048, seqlen_kv=2048), Target.fake(sm=80))
    assert found is not None
    assert not found.measured
    assert found.why.startswith("not measured here: by pairs and bytes")


#: Seconds. Kernels that differ by less differ by less than one of them takes to be launched.
_A_LAUNCH = 10e-6
#: models whose proved masks stay tensors -> (batch, heads, queries, keys, head dim), and whether the model itself puts the mask into a bias
#: for each pair; else padding hides keys from one query
_DENSE_STILL = {
    "DeBERTa v3": ((8, 12, 512, 512, 64), True),
    "DeBERTa v3, longer": ((8, 12, 1024, 1024, 64), True),
    "Wav2Vec2-BERT": ((4, 16, 512, 512, 64), True),
    "Parakeet": ((4, 8, 250, 250, 128), True),
    "SigLIP 2, pooling": ((8, 12, 1, 256, 64), False),
}


@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("sm", MACHINES)
@pytest.mark.parametrize("model", _DENSE_STILL)
def test_a_mask_that_stays_a_tensor_costs_no_more_than_a_launch(model: str, sm: int, training: bool) -> None:
    """Each kernel reads the bias, with the mask in it. Of one query the numbers are few beside the keys."""
    (batch, heads, queries, keys, head_dim), is_bias = _DENSE_STILL[model]
    sizes: dict[str, Any] = {
        "batch": batch,
        "heads": heads,
        "heads_kv": heads,
        "seqlen_q": queries,
        "seqlen_kv": keys,
        "head_dim": head_dim,
        "needs_grad": training,
    }
    if is_bias:
        spec = make_spec(changes=(bias(batch, heads, queries, keys, requires_grad=training),), **sizes)
    else:
        spec = make_spec(mask=dense(batch, 1, 1, keys), **sizes)
    target = Target.fake(sm=sm)
    names = [name for name in ("triton", *PYTORCHS) if not by_name(name).why_not(spec, target)]
    found = decide(spec, target, Options()).lowering
    if found == "decode":
        # It reads no more of each key than they do, and the model says nothing of it.
        assert queries == 1
        return
    taken, least = (cost.seconds(name, spec, target) for name in (found, cost.cheapest(names, spec, target) or ""))
    assert taken is not None
    assert least is not None
    assert taken <= 1.001 * least + _A_LAUNCH
