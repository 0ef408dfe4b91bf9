"""Comparisons: what is measured of two sides, kept and rendered."""

from __future__ import annotations

import dataclasses
import json
import math
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from attn_compiler.compiling.comparing import results, timing
from attn_compiler.compiling.comparing.comparison import Comparison
from attn_compiler.compiling.comparing.results import Distance
from attn_compiler.compiling.comparing.sides import Side
from attn_compiler.reporting import render
from attn_compiler.reporting.doctor import Fact
from attn_compiler.reporting.facts import UnpadReport
from attn_compiler.reporting.report import Report, Reports

# The JSON of a comparison keeps its keys.
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
        "version", "model", "inputs", "training", "modes", "settings", "facts", "sides", "gain", "drew_random_numbers", "sentences",
        "reports",
    }  # fmt: skip
    assert set(found["sides"][0]) == {
        "name", "first_seconds", "rounds", "milliseconds", "ratio", "held_bytes", "peak_bytes", "outputs", "gradients", "failure",
    }  # fmt: skip
    assert set(found["sides"][1]["outputs"]) == {"largest", "where", "beside", "others", "at_padding", "cosine"}
    assert found["reports"]["num_graphs"] == 1


# What is asked of a comparison's data.
def test_the_gain_is_our_ratio() -> None:
    assert made().gain == 2.0
    assert made(failure="ValueError: no").gain is None


def test_a_side_is_asked_for_by_its_name() -> None:
    found = made()
    assert found.side("inductor") is found.sides[1]
    with pytest.raises(StopIteration):
        found.side("nobody")


# The text of a comparison.
def test_a_table_with_a_row_for_each_side() -> None:
    lines = str(made()).splitlines()
    assert lines[0] == "Llama: a training step, in train()"
    assert lines[2] == "machine   CPU: Zen, torch uses 2 threads; GPU 0: NVIDIA H100, sm90, 80 GiB"
    assert lines[3] == "versions  Python 3.12.1, attn_compiler 1.0, torch 2.13.0"
    assert lines[4] == "options   dynamic=True, unpad=True"
    rows = {line.split()[0]: line.split()[1:] for line in lines[6:] if line}
    assert rows["eager"] == "500 ms 20 ms 19 to 21 0.50x - - -".split()
    assert rows["inductor"] == "12.00 s 10 ms 9 to 11 1.00x 3.0 MB 0.25 0.25".split()
    assert rows["attn_compiler"] == "8.00 s 5 ms 4.5 to 6 2.00x 2.0 MB 0 * 0.25".split()
    assert "peak memory: of the GPU during a step; 1.0 MB of it were held before one." in lines
    assert "* attn_compiler and eager do not both have, or have in other shapes: cache." in lines
    assert "Times are far apart" not in str(made())


def test_times_that_are_far_apart_are_said_to_be() -> None:
    found = made()
    eager, inductor, ours = found.sides
    apart = dataclasses.replace(ours, milliseconds=(4.0, 5.0, 6.1))
    assert "Times are far apart" in str(dataclasses.replace(found, sides=(eager, inductor, apart)))


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("on_gpu", [False, True])
def test_no_line_is_wider_than_a_report(training: bool, on_gpu: bool) -> None:
    found = made(training=training, on_gpu=on_gpu)
    assert all(len(line) <= render.WIDTH for line in str(found).splitlines())
    assert ("gradients off: " in str(found)) == training
    assert "attn_compiler " in str(found)
    assert "…" not in str(found)
    assert ("not measured, since nothing is on a CUDA device" in str(found)) == (not on_gpu)


def test_a_side_that_failed_has_its_reason_below_the_table() -> None:
    text = str(made(failure="ValueError: no such kernel"))
    assert "inductor failed: ValueError: no such kernel" in text
    row = next(line for line in text.splitlines() if line.startswith("inductor "))
    assert row.split()[1:3] == ["-", "failed"]


def test_padding_that_is_left_out_is_said_to_differ() -> None:
    report = Report(graph="0/0", target="cpu", unpad=UnpadReport(zeroed=("last_hidden_state",)))
    text = str(dataclasses.replace(made(), reports=Reports([report])))
    assert "unpad: last_hidden_state is 0 at padding." in text
    assert "unpad:" not in str(made())


def test_what_differs_at_padding_alone_is_told_apart() -> None:
    found = made()
    far = Distance(largest=0.1, where="logits", beside=2.0, at_padding=7.5)
    sides = tuple(
        dataclasses.replace(side, outputs=far if side.name == "attn_compiler" else None) for side in found.sides
    )
    text = str(dataclasses.replace(found, sides=sides))
    assert "at padding, where attention_mask is 0: outputs are off by 7.5 (attn_compiler)." in text
    assert "at padding" not in str(found)


# Steps that are timed in turn.
def _noting(calls: list[str], name: str) -> Callable[[], None]:
    return lambda: calls.append(name)


def test_ratio_is_the_median_of_the_rounds_own_and_above_one_when_we_are_faster() -> None:
    # The machine slows down threefold half-way: the rounds' ratios stay 2, the ratio of a mixed pair would not.
    baseline, ours = [2.0, 2.0, 6.0, 6.0], [1.0, 1.0, 3.0, 3.0]
    assert timing.ratio(baseline, ours) == 2.0


def test_interleave_takes_turns_and_turns_the_order() -> None:
    calls: list[str] = []
    steps = {name: _noting(calls, name) for name in ("a", "b")}
    times = timing.interleave(steps, "cpu", seconds=0, min_rounds=4, warmup=0)
    assert calls == ["a", "b", "b", "a", "a", "b", "b", "a"]
    assert [len(values) for values in times.values()] == [4, 4]


def test_what_comes_before_a_step_is_called_ahead_of_each() -> None:
    calls: list[str] = []
    step = {"a": _noting(calls, "a")}
    timing.interleave(step, "cpu", seconds=0, min_rounds=2, warmup=1, before=_noting(calls, "before"))
    assert calls == ["before", "a"] * 3


def test_percentiles() -> None:
    assert timing.percentiles([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]) == (2.0, 3.5, 5.0)


# What a call gives, by name, and how far two of them are apart.
Pair = namedtuple("Pair", "first second")


@dataclass
class Output:
    logits: torch.Tensor
    cache: Any = None
    note: str = ""


class Layers:
    def __init__(self, x: torch.Tensor) -> None:
        self.layers = [x, x + 1]
        self.owner = self


def test_outputs_are_named_by_their_place() -> None:
    x = torch.ones(1)
    assert list(results.outputs_of(x)) == ["output"]
    assert list(results.outputs_of((x, [x + 1, None], 3))) == ["[0]", "[1][0]"]
    assert list(results.outputs_of(OrderedDict(loss=x, hidden=(x, x)))) == ["loss", "hidden[0]", "hidden[1]"]
    assert list(results.outputs_of(Output(logits=x, cache=Layers(x)))) == [
        "logits",
        "cache.layers[0]",
        "cache.layers[1]",
    ]
    assert list(results.outputs_of(Pair(x, x))) == ["first", "second"]
    assert results.outputs_of(None) == {}


def test_the_loss_is_the_models_own() -> None:
    x = torch.ones(2, requires_grad=True)
    own = (x * 3).sum()
    assert results.loss_of({"logits": x * 2, "loss": own}, {}) is not None
    loss = results.loss_of({"logits": x * 2, "loss": own}, {})
    assert loss is not None
    assert float(loss.detach()) == 6


def test_without_a_loss_every_output_counts_and_the_noise_is_the_same_again() -> None:
    x = torch.ones(2, requires_grad=True)
    noise: dict[str, torch.Tensor] = {}
    losses = [results.loss_of({"a": x * 2, "b": torch.ones(3), "c": x.to(torch.bfloat16)}, noise) for _ in range(2)]
    assert set(noise) == {"a", "c"}
    assert losses[0] is not None
    assert losses[1] is not None
    assert float(losses[0].detach()) == float(losses[1].detach())
    assert results.loss_of({"b": torch.ones(3)}, {}) is None


def test_the_largest_difference_and_where_it_is() -> None:
    own = {"a": torch.tensor([1.0, -8.0]), "b": torch.tensor([True, False]), "c": torch.tensor([1 + 1j])}
    new = {"a": torch.tensor([1.25, -8.0]), "b": torch.tensor([True, False]), "c": torch.tensor([1 + 1j])}
    assert results.distance(own, own) == results.Distance(largest=0.0, where="a", beside=8.0)
    assert results.distance(new, own) == results.Distance(largest=0.25, where="a", beside=8.0)


@pytest.mark.parametrize("odd", [math.nan, math.inf])
def test_what_is_no_number_on_one_side_alone_is_infinitely_far(odd: float) -> None:
    own, new = {"a": torch.tensor([1.0, 2.0])}, {"a": torch.tensor([odd, 2.0])}
    assert results.distance(new, own).largest == math.inf
    assert results.distance(new, new).largest == 0


def test_what_only_one_has_is_named() -> None:
    one, two = torch.ones(1), torch.ones(2)
    found = results.distance({"a": one, "b": one, "d": two}, {"a": one, "c": one, "d": one})
    assert sorted(found.others) == ["b", "c", "d"]
    assert found.largest == 0


def test_no_gradient_is_one_of_zeros() -> None:
    found = results.distance({"a": None, "b": None}, {"a": torch.tensor([0.0, 0.5]), "b": None})
    assert found == results.Distance(largest=0.5, where="a", beside=0.5)
    assert results.distance({"a": torch.tensor([0.25])}, {"a": None}).largest == 0.25


def test_padding_is_compared_apart_and_in_no_loss() -> None:
    padding = torch.tensor([[True, False, False], [False, False, True]])
    own = {"hidden": torch.zeros(2, 3, 4), "pooled": torch.zeros(2, 4)}
    hidden = torch.zeros(2, 3, 4)
    hidden[padding] = 5.0
    hidden[1, 1, 2] = 0.25
    far = results.distance({"hidden": hidden, "pooled": torch.full((2, 4), 0.125)}, own, padding)
    assert (far.largest, far.where, far.at_padding) == (0.25, "hidden", 5.0)
    assert results.distance({"pooled": torch.ones(2, 4)}, {"pooled": own["pooled"]}, padding).at_padding is None
    hidden.requires_grad_()
    loss = results.loss_of({"hidden": hidden}, {}, padding)
    assert loss is not None
    (grad,) = torch.autograd.grad(loss, hidden)
    assert not grad[padding].any()
    assert grad[~padding].all()


def test_all_of_a_tensor_may_be_padding() -> None:
    far = results.distance({"x": torch.ones(1, 2, 1)}, {"x": torch.zeros(1, 2, 1)}, torch.ones(1, 2, dtype=torch.bool))
    assert (far.largest, far.at_padding) == (0.0, 1.0)


@pytest.mark.parametrize("shape", [(2, 3), (2, 3, 4, 4)])
def test_classes_and_heads_may_be_as_many_as_tokens(shape: tuple[int, ...]) -> None:
    padding = torch.tensor([[True, False, False], [False, False, True]])
    new = torch.zeros(shape)
    new[padding] = 5.0
    far = results.distance({"x": new}, {"x": torch.zeros(shape)}, padding)
    assert (far.largest, far.at_padding) == (5.0, None)
    new.requires_grad_()
    loss = results.loss_of({"x": new}, {}, padding)
    assert loss is not None
    assert torch.autograd.grad(loss, new)[0].all()


def test_padding_of_an_encoder_is_not_a_decoders() -> None:
    padding = torch.tensor([[True, False, False], [False, False, True]])
    wrong = torch.zeros(2, 3, 4)
    wrong[padding] = 5.0
    own = {"logits": torch.zeros(2, 3, 4), "encoder_last_hidden_state": torch.zeros(2, 3, 4)}
    far = results.distance({"logits": wrong, "encoder_last_hidden_state": own["logits"]}, own, padding)
    assert (far.largest, far.where, far.at_padding) == (5.0, "logits", 0.0)
    far = results.distance({"logits": own["logits"], "encoder_last_hidden_state": wrong}, own, padding)
    assert (far.largest, far.at_padding) == (0.0, 5.0)
