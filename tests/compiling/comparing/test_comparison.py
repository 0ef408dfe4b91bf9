"""The JSON of a comparison keeps its keys."""

from __future__ import annotations

import json

from attn_compiler.compiling.comparing.comparison import Comparison
from attn_compiler.compiling.comparing.results import Distance
from attn_compiler.compiling.comparing.sides import Side
from attn_compiler.reporting.doctor import Fact
from attn_compiler.reporting.report import Report, Reports

FACTS = tuple(
    Fact(name=name, value=value)
    for name, value in (
        ("attn_compiler", "1.0"),
        ("Python", "3.12.1"),
        ("CPU", "Zen, torch uses 2 threads"),
        ("torch", "2.13.0"),
        ("triton", "not installed"),
        ("GPU 0", "NVIDIA H100, sm90, 80 GiB"),
    )
)


def made(*, training: bool = True, on_gpu: bool = True, failure: str | None = None) -> Comparison:
    """A comparison with round numbers. failure: of Inductor."""
    off = Distance(largest=0.25, where="logits", beside=8.0)
    inductor = Side(
        name="inductor",
        first_seconds=12.0,
        rounds=5,
        milliseconds=(9.0, 10.0, 11.0),
        ratio=1.0,
        held_bytes=1_000_000 if on_gpu else None,
        peak_bytes=3_000_000 if on_gpu else None,
        outputs=off,
        gradients=off if training else None,
    )
    if failure is not None:
        inductor = Side(name="inductor", failure=failure)
    ours = Side(
        name="attn_compiler",
        first_seconds=8.0,
        rounds=5,
        milliseconds=(4.5, 5.0, 6.0),
        ratio=2.0 if failure is None else None,
        held_bytes=1_000_000 if on_gpu else None,
        peak_bytes=2_000_000 if on_gpu else None,
        outputs=Distance(largest=0.0, where="logits", beside=8.0, others=("cache",)),
        gradients=off if training else None,
    )
    eager = Side(name="eager", first_seconds=0.5, rounds=5, milliseconds=(19.0, 20.0, 21.0), ratio=0.5)
    return Comparison(
        model="Llama",
        inputs=("input_ids int64[2, 64] on cuda:0",),
        training=training,
        modes="in train()",
        settings={"mode": None, "dynamic": True, "options": {"unpad": "True"}},
        facts=FACTS,
        sides=(eager, inductor, ours),
        drew_random_numbers=False,
        reports=Reports([Report(graph="0/0", target="sm90")]),
    )


def test_the_json_keeps_its_keys() -> None:
    found = json.loads(made().to_json())
    assert set(found) == {
        "version", "model", "inputs", "training", "modes", "settings", "facts", "sides", "gain", "drew_random_numbers", "reports",
    }  # fmt: skip
    assert set(found["sides"][0]) == {
        "name", "first_seconds", "rounds", "milliseconds", "ratio", "held_bytes", "peak_bytes", "outputs", "gradients", "failure",
    }  # fmt: skip
    assert set(found["sides"][1]["outputs"]) == {"largest", "where", "beside", "others", "at_padding"}
    assert found["reports"]["num_graphs"] == 1
