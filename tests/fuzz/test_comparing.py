"""What counts as wrong, and what is not compared at all."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from tests.fuzz import comparing
from tests.fuzz.comparing import Left, Outcome, Result, Wrong
from tests.fuzz.program import Input, Program
from tests.fuzz.test_program import PLAIN

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
