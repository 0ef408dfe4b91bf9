"""Programs of the fuzzer, how they are compared, kept and tallied."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
from collections import Counter
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch

from tests.fuzz import comparing, corpus, crew, discards, environment, searching
from tests.fuzz.comparing import Left, Outcome, Result, Wrong
from tests.fuzz.corpus import Known, Mistaken, Turn
from tests.fuzz.crew import Ended, Limits
from tests.fuzz.discards import Left as LeftCorpus
from tests.fuzz.program import Input, Program, length
from tests.fuzz.tally import Tally

# A program's text, inputs and exact run.
PLAIN = Program(
    rule="sdpa calls",
    inputs=(
        Input(name="q0", shape=("b", "h", "q", "d"), grad=True),
        Input(name="k1", shape=(2, "b", "h", "k", "d"), layout="{}[1]", grad=True),
        Input(name="m2", shape=(1, "k"), kind="kept", layout="{}.expand($q, -1)"),
    ),
    lines=(
        "s = q0 @ k1.mT",
        "s = s.masked_fill(~m2, -inf)",
        "# probe: s.amax(3)",
        "w = F.softmax(s.to(W), -1).to(D)",
        "o = w @ k1",
    ),
    outputs=("o",),
    dtype=torch.bfloat16,
    sizes=(("b", 2), ("h", 2), ("q", 3), ("k", 4), ("d", 4)),
)


def test_sizes_are_numbers_names_and_products() -> None:
    assert [length(size, {"b": 2, "h": 3}) for size in (5, "b", "b*h", "2*h", "h*2*b")] == [5, 2, 6, 6, 12]


def test_inputs_are_what_they_are_called() -> None:
    q, k, kept = PLAIN.bases(PLAIN.calls[0])
    assert q.requires_grad
    assert q.dtype == torch.bfloat16
    assert tuple(k.shape) == (2, 2, 2, 4, 4)
    assert bool(kept[:, 0].all())


def test_a_split_mask_has_both_values_in_each_row_and_column() -> None:
    for seed in range(5):
        x = Input(name=f"m{seed}", shape=("b", 4, 4), kind="split").base(seed, torch.float32, {"b": 3}, "cpu")
        for axis in (1, 2):
            assert bool(x.any(axis).all())
            assert not bool(x.all(axis).any())


def test_a_filled_row_ends_somewhere_and_elsewhere_in_another_call() -> None:
    rows = Input(name="pad0", shape=("b", "q"), kind="filled")
    seen = [rows.base(0, torch.float32, {"b": 5, "q": 7, "fill": fill}, "cpu") for fill in (0, 1, 2, 1)]
    assert all(bool((x.diff(dim=1) <= 0).all()) for x in seen)
    assert all(x[0].sum() >= 2 for x in seen)
    assert torch.equal(seen[1], seen[3])
    assert not any(torch.equal(a, b) for a, b in itertools.pairwise(seen))


def test_the_exact_run_has_the_same_numbers_in_float64() -> None:
    pairs = zip(PLAIN.bases(PLAIN.calls[0]), PLAIN.bases(PLAIN.calls[0], exact=True), strict=True)
    assert all(torch.equal(a.double(), b.double()) for a, b in pairs)
    found = comparing.results(PLAIN, PLAIN.function(exact=True), PLAIN.calls[0], exact=True)
    assert found[0].value is not None
    assert found[0].value.dtype == torch.float64


def test_only_the_eager_run_is_probed() -> None:
    seen: list[torch.Tensor] = []
    comparing.results(PLAIN, PLAIN.function(probe=seen.append), PLAIN.calls[0])
    assert [tuple(x.shape) for x in seen] == [(2, 2, 3)]
    comparing.results(PLAIN, PLAIN.function(), PLAIN.calls[0])
    assert len(seen) == 1


# What counts as wrong, and what is not compared at all.
SITE = ("s = q0 @ k1.mT", "w = s.softmax(-1)", "o = w @ k1")


def held(found: float, eager: float, exact: float, dtype: torch.dtype = torch.float32, noise: float = 0.0) -> None:
    one = [
        Result(name="o", value=torch.tensor([x], dtype=t))
        for x, t in ((eager, dtype), (exact, torch.float64), (found, dtype))
    ]
    comparing._hold(PLAIN, [one[0]], [one[1]], [one[2]], Outcome(), lambda: [noise])


def test_twice_as_far_off_as_eager_is_right() -> None:
    held(1.019, eager=1.01, exact=1.0)
    with pytest.raises(Wrong, match=r"off by 0\.1"):
        held(1.1, eager=1.01, exact=1.0)


def test_what_roundings_of_the_inputs_do_is_right() -> None:
    held(1.1, eager=1.01, exact=1.0, noise=0.05)
    with pytest.raises(Wrong, match=r"off by 0\.5"):
        held(1.5, eager=1.01, exact=1.0, noise=0.05)


def test_nan_is_wrong_where_eager_has_none() -> None:
    with pytest.raises(Wrong, match="off by inf"):
        held(float("nan"), eager=1.0, exact=1.0, dtype=torch.float16)


def test_a_program_that_compiled_code_gets_right() -> None:
    outcome = comparing.check(dataclasses.replace(PLAIN, lowerings=("reference",)))
    assert outcome.lowered == {"reference": 1}


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        (("o = q0 + torch.ones(7)",), "eager raises"),
        (("o = q0 / 0",), "NaN or Inf"),
        (("s = q0 @ k1.mT - 1e9", "# probe: s.amax(3)", "o = s.softmax(-1) @ k1"), "rows without keys"),
        (
            ("s = (q0 @ k1.mT).clamp(max=-7e4) + 2e5", "# probe: s.amax(3), s.amin(3)", "o = s.softmax(-1) @ k1"),
            "rows without keys",
        ),
    ],
)
def test_what_eager_says_nothing_of_is_left(lines: tuple[str, ...], why: str) -> None:
    with pytest.raises(Left, match=why):
        comparing.check(dataclasses.replace(PLAIN, lines=lines))


def gradients(*more: str, after: tuple[str, ...] = ()) -> list[Any]:
    program = Program(
        rule="caller writes",
        inputs=(Input(name="q0", shape=("b", "q", "d"), grad=True), Input(name="k1", shape=("b", "k", "d"), grad=True)),
        lines=(*SITE, *more),
        outputs=("o",),
        after=after,
        sizes=(("b", 1), ("q", 3), ("k", 4), ("d", 4)),
    )
    _, exact = comparing.expected(program, program.calls[0])
    return [r.value for r in exact if r.name.startswith("gradient")]


def test_gradients_of_overwritten_numbers_are_not_compared() -> None:
    assert all(g is not None for g in gradients())
    assert all(g is not None for g in gradients("o.data.mul_(2)"))
    assert None in gradients("k1.data.mul_(2)")
    assert None in gradients(after=("k1.data.mul_(2)",))


def test_a_gradient_that_went_through_a_cast_may_be_the_next_number() -> None:
    cast = dataclasses.replace(PLAIN, lines=("v = k1.to(torch.bfloat16).to(D)", *PLAIN.lines))
    assert comparing._next_number(cast, torch.float32) == torch.finfo(torch.bfloat16).eps
    assert comparing._next_number(cast, torch.bfloat16) == 0
    assert comparing._next_number(PLAIN, torch.float32) == 0


def test_rows_that_are_shut_out_are_seen_before_their_maximum_is_taken_off() -> None:
    lines = (
        "s = q0 @ k1.mT - 1e9",
        "# probe: s.amax(2), s.amin(2)",
        "s = s - s.amax(2, keepdim=True)",
        "o = s.softmax(-1) @ k1",
    )
    with pytest.raises(Left, match="rows without keys"):
        comparing.check(dataclasses.replace(PLAIN, lines=lines))


def test_the_exact_gradient_of_a_row_without_keys_weighs_all_keys_alike() -> None:
    """PyTorch's kernel for a CPU counts each of them as the only one."""
    program = Program(
        rule="rows without keys",
        inputs=(Input(name="q0", shape=("b", "q", "d")), Input(name="k1", shape=("b", "k", "d"), grad=True)),
        lines=("m = torch.full((3, 4), torch.finfo(q0.dtype).min, dtype=q0.dtype)",),
        outputs=("o",),
        sizes=(("b", 2), ("q", 3), ("k", 4), ("d", 4)),
    )
    call = "o = F.scaled_dot_product_attention(q0[None], k1.detach()[None], k1[None], attn_mask=m)[0]"
    plain = "o = k1.mean(1, keepdim=True).expand(2, 3, 4)"
    found, wanted = (
        comparing.results(made, made.function(exact=True), program.calls[0], exact=True)[2].value
        for made in (dataclasses.replace(program, lines=(*program.lines, line)) for line in (call, plain))
    )
    assert found is not None
    assert wanted is not None
    torch.testing.assert_close(found, wanted)


PADDED = Program(
    rule="padded batches",
    inputs=(Input(name="x0", shape=("b", "q", "d"), grad=True), Input(name="pad1", shape=("b", "q"), kind="filled")),
    lines=(
        "q = x0[:, None]",
        "y = F.scaled_dot_product_attention(q, q, q, attn_mask=pad1[:, None, None] != 0)[:, 0]",
        "o = x0 + y",
    ),
    outputs=("o",),
    reads=("{}.masked_fill((pad1 == 0)[..., None], 0)",),
    unpad=True,
    sizes=(("b", 3), ("q", 5), ("d", 8), ("fill", 0)),
    others=(("b", 3), ("q", 5), ("d", 8), ("fill", 2)),
)


def test_what_the_caller_does_not_read_is_not_compared() -> None:
    assert comparing.check(PADDED).proved["padding is left out"] == 1
    with pytest.raises(Wrong, match="output o"):
        comparing.check(dataclasses.replace(PADDED, reads=()))


def test_padding_that_is_read_in_the_text_stays() -> None:
    read = dataclasses.replace(PADDED, lines=(*PADDED.lines, "o = o - o.mean(1, keepdim=True)"))
    assert comparing.check(read).proved["padding stays"] == 1


# The programs that planted faults are looked for with.
LIMITS = Limits(processes=1, method="fork", renewed=1)


@pytest.mark.parametrize(
    ("raised", "kind"), [(None, Known), (LeftCorpus("why"), type(None)), (Wrong("wrong", "far"), Mistaken)]
)
def test_a_program_is_known_says_nothing_or_is_wrong(raised: Exception | None, kind: type) -> None:
    with mock.patch.object(searching, "judged", side_effect=raised, return_value=Outcome()):
        assert type(corpus._observed(PLAIN, 1.0)) is kind


def test_what_is_wrong_without_a_fault_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    known = Known(program=PLAIN, ran=frozenset(), lowered=frozenset(), seconds=0.0)
    other = dataclasses.replace(known, program=dataclasses.replace(PLAIN, rule="views"))

    def events(turns: Iterator[Turn], _: Limits) -> Iterator[tuple[Turn, Any]]:
        first, second = turns
        yield second, other
        yield first, Mistaken(program=PLAIN, text="off by 7")
        yield first, known
        yield first, Ended(text=None)

    with mock.patch.object(crew, "events", events):
        assert corpus.programs(seed=1, rounds=1, limits=LIMITS, rules=("views", "sinks")) == [known, other]
    said = capsys.readouterr().out
    assert "wrong without any fault: off by 7" in said
    assert PLAIN.lines[0] in said


# What is counted.
def test_tallies_are_joined_printed_and_written() -> None:
    one, other = Tally(), Tally()
    one.compared("views", Outcome(lowered=Counter(reference=2), untouched=1, proved=Counter(Causal=1)))
    other.compared("views", Outcome(missed=1))
    other.left("views", "eager raises: RuntimeError")
    other.wrong("sinks")
    one.join(other)
    assert one.rules["views"]["programs"] == 3
    assert one.total == Counter(
        programs=4, compared=2, matched=1, wrong=1, discarded=1, sites=2, untouched=1, missed=1
    ) + Counter({"left alone": 1})
    assert "sites by lowering: reference 2" in one.table()
    assert "programs by lowering: reference 1" in one.table()
    assert "1  eager raises: RuntimeError" in one.table()
    assert one.discarded == 1 / 4
    assert json.loads(json.dumps(one.plain()))["proved"] == {"Causal": 1}


# Discards are of known kinds.
def test_an_error_of_eager_is_told_without_its_numbers() -> None:
    left = discards.of_eager(IndexError("Dimension out of range (expected to be in range of [-3, 2], but got 4)\nmore"))
    assert str(left) == "eager raises IndexError: Dimension out of range (expected to be in range of , but got )"


@pytest.mark.parametrize(
    "text",
    [
        "a variable was modified by an inplace operation: [CUDABFloat16Type [2, 16, 7]], which is",
        "a variable was modified by an inplace operation: [torch.cuda.HalfTensor [2, 32, 16]] is at version 1",
        "modified by an inplace operation: [X [2]], which is output 0 of ScaledDotProductCudnnAttentionBackward0, is at",
        "cannot reshape tensor\nException raised from infer_size_impl (most recent call first):\nframe #0: std::allocator<char>",
    ],
)
def test_names_of_types_are_no_errors_of_the_machine(text: str) -> None:
    assert discards.of_eager(RuntimeError(text)) is not None


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, use 'spawn'"),
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        MemoryError(),
        AssertionError("x"),
    ],
)
def test_an_error_of_the_machine_is_no_discard(error: Exception) -> None:
    assert discards.of_eager(error) is None


@pytest.mark.parametrize(
    ("error", "what"),
    [
        (RuntimeError("cuDNN Frontend error: The stride for the last dimension corresponding to the embedding size per "
                      "head should be 1 for output_names::O"), "strides"),
        (AttributeError("'NoneType' object has no attribute 'stride'"), "empty batch"),
    ],
)  # fmt: skip
def test_what_cudnn_can_not_do_in_eager_either(error: Exception, what: str) -> None:
    assert what in str(discards.of_eager(error))


def test_after_an_error_of_a_kernel_comes_nothing_more() -> None:
    left = discards.of_eager(RuntimeError("CUDA error: device-side assert triggered\nmore"))
    assert left is not None
    assert left.is_last
    other = discards.of_eager(RuntimeError("shape '[2]' is invalid for input of size 3"))
    assert other is not None
    assert not other.is_last


def test_of_torch_only_what_is_listed() -> None:
    assert discards.of_torch("InternalError: something new") is None
    assert discards.of_torch("Unsupported: argument 'is_causal' must be bool, not SymBool") is not None


def test_processes_on_the_cpu_see_no_gpu() -> None:
    before = dict(os.environ)
    with environment.prepared("cpu"):
        assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
        assert os.environ["TRITON_INTERPRET"] == "1"
    assert dict(os.environ) == before
    assert "CUDA_VISIBLE_DEVICES" not in environment.variables("cuda")


def test_a_reshape_of_a_roll_is_no_fault_of_ours() -> None:
    text = "RuntimeError: view size is not compatible with input tensor's size and stride (at least one dimension ...)"
    assert discards.of_roll(text, source="k = k.roll(1, 2)", inner="aot_eager") is not None
    assert discards.of_roll(text, source="k = k.roll(1, 2)", inner="inductor") is None
    assert discards.of_roll(text, source="k = k.flip(2)", inner="aot_eager") is None
