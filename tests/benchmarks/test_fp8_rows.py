from __future__ import annotations

from attn_compiler.lowerings.choice import fp8_speed
from benchmarks import bench_fp8, fp8_rows, harness

FP8 = [
    {"case": "causal_d128_s8192", "head_dim": "128", "seqlen": "8192", "date": "2026-11-21", "recipe": "", "part": part}
    | {"pass": "forward", "side": side, "tflops": tflops, "heads_q": "16", "heads_kv": "16"}
    | {"batch": "2", "pairs": str(8192 * 8193)}
    for side, part, tflops in (
        ("sdpa_cudnn", "whole", "600"),
        ("hopper_fp8", "whole", "700"),
        ("hopper_fp8", "kernel", "800"),
        ("triton_fp8", "whole", ""),
    )
]
SELECT = [
    {"case": "causal_d128_s8192", "pass": which, "side": side, "p50_us": us, "tflops": tflops}
    for which, side, us, tflops in (
        ("forward", "sdpa_cudnn", "1000", "500"),
        ("forward", "fa4", "800", "625"),
        ("backward", "sdpa_cudnn", "2500", "500"),
        ("backward", "fa4", "2000", "625"),
    )
]


def test_speeds_of_another_run_are_placed_beside_cudnns() -> None:
    rows = {row["lowering"]: row for row in fp8_rows.rows_of(FP8, SELECT)}
    assert {name: row["tflops"] for name, row in rows.items()} == {
        "sdpa_cudnn": "600",
        "hopper_fp8": "700",
        "fa4": "750",
    }
    assert rows["fa4"]["training"] == "no"
    assert {row["grouped"] for row in rows.values()} == {"no"}
    assert {row["keys"] for row in rows.values()} == {"4096.5"}
    assert (rows["fa4"]["head_dim_from"], rows["fa4"]["head_dim_to"]) == ("65", "128")


def test_what_was_measured_beside_fp8_is_not_placed() -> None:
    beside = [*FP8, FP8[0] | {"side": "fa4", "tflops": "690"}]
    rows = {row["lowering"]: row for row in fp8_rows.rows_of(beside, SELECT)}
    assert rows["fa4"]["tflops"] == "690"


def test_one_shape_may_have_two_names() -> None:
    sizes = {"batch": "2", "heads_q": "16", "heads_kv": "16", "seqlen": "8192", "head_dim": "128", "head_dim_v": "128"}
    shape = {**sizes, "pairs": str(8192 * 8193)}
    fp8 = [{**row, **shape, "case": "causal_d128_s8192_other"} for row in FP8]
    rows = {row["lowering"]: row for row in fp8_rows.rows_of(fp8, [{**row, **shape} for row in SELECT])}
    assert rows["fa4"]["tflops"] == "750"
    apart = [{**row, **shape, "pairs": "7"} for row in SELECT]
    assert "fa4" not in {row["lowering"] for row in fp8_rows.rows_of(fp8, apart)}


def test_training_is_forward_and_backward_together() -> None:
    both = [row | {"pass": "both"} for row in FP8]
    rows = {row["lowering"]: row for row in fp8_rows.rows_of(both, SELECT)}
    assert rows["fa4"]["tflops"] == "750"
    assert {row["training"] for row in rows.values()} == {"yes"}


def test_the_file_holds_what_was_measured() -> None:
    """But for what comes from another file, whose rows may have become others since."""
    made = fp8_rows.rows_of(harness.read(bench_fp8.RESULTS), [])
    kept = harness.read(fp8_speed.TABLE.path)
    ours, theirs = ([row for row in rows if row["lowering"] not in fp8_rows.OTHERS] for rows in (kept, made))
    assert ours == theirs
