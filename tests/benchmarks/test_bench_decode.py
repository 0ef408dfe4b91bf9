from __future__ import annotations

import dataclasses

import pytest
import torch

from attn_compiler.lowerings.decode import plan as decode_plan, schedule as decode_schedule
from attn_compiler.lowerings.decode.plan import DecodeCall
from attn_compiler.spec.target import Target
from benchmarks import bench_decode, decode_cases
from benchmarks.decode_cases import Case

H200 = Target.fake()
SMALL = Case(name="small", batch=2, length=150, filled=130, heads_q=4, heads_kv=2, head_dim=16)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"window": 40},
        {"seqlen_q": 3, "softcap": 2.0},
        {"sinks": True, "head_dim_v": 32},
        {"stored": "float8_e4m3fn"},
    ],
    ids=str,
)
def test_our_side_computes_what_is_expected(changes: dict[str, int]) -> None:
    problem = decode_cases.build(dataclasses.replace(SMALL, **changes), "cpu", dtype=torch.float32)
    call = bench_decode.ours(problem, decode_schedule.schedule(problem.spec, Target.fake(device="cpu")))[0]
    assert bench_decode.error(call(), decode_cases.expected(problem)) < 1e-5


@pytest.mark.parametrize("case", decode_cases.CASES, ids=lambda case: case.name)
def test_operands_are_those_that_the_lowering_would_make(case: Case) -> None:
    problem = decode_cases.build(case, "meta")
    plan = decode_plan.plan_of(DecodeCall(spec=problem.spec, schedule=decode_schedule.schedule(problem.spec, H200)))
    assert set(plan.operands) - {"count"} == set(problem.named)
    assert problem.named["bounds"].shape == (2, case.batch, case.seqlen_q)


def test_bytes_are_those_of_the_keys_in_use() -> None:
    assert decode_cases.BY_NAME["b16_4k"].bytes_used == 2 * 16 * 8 * 4096 * 256
    assert decode_cases.BY_NAME["b16_4k_half"].bytes_used == decode_cases.BY_NAME["b16_4k"].bytes_used // 2
    assert decode_cases.BY_NAME["window_b16_8k"].used == 1024
