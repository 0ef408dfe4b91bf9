"""The form of a recurrence as text, and words for people."""

from __future__ import annotations

import dataclasses

from attn_compiler.spec.linear import LinearForm, LinearSpec

FORM = LinearForm(
    function="models.next:chunk#1", recurrence="delta", roles=("q", "k", "v", "g", "beta"), chunk=64, eps=1e-6
)
STATE_SPACE = LinearForm(
    function="models.bamba:scan#2",
    recurrence="ssd",
    roles=("x", "dt", "A", "B", "C", "D", "state"),
    chunk=256,
    softplus=True,
    limits=(0.0, float("inf")),
    state_dtype="float64",
)


def test_a_text_is_read_back_as_it_was() -> None:
    for form in (FORM, STATE_SPACE):
        assert LinearForm.from_text(form.text) == form
    assert FORM.text != dataclasses.replace(FORM, eps=None).text


def test_a_state_is_told_by_its_role() -> None:
    assert (FORM.has_state, STATE_SPACE.has_state) == (False, True)


def test_words_say_the_recurrence_its_heads_and_its_decay() -> None:
    spec = LinearSpec(
        form=FORM,
        batch=2,
        length="s0",
        num_heads_k=4,
        num_heads_v=4,
        head_dim_k=16,
        head_dim_v=16,
        dtype="float32",
        device="cpu",
    )
    assert spec.words == "gated delta rule, 4 heads of 16/16, decay a head"
    grouped = dataclasses.replace(spec, num_heads_k=2, form=dataclasses.replace(FORM, channel=True))
    assert grouped.words == "gated delta rule, 4 heads of 16/16, 2 of q and k, decay a channel"
    of_ssd = dataclasses.replace(spec, form=STATE_SPACE, num_heads_k=1, num_heads_v=1)
    assert of_ssd.words == "state space (Mamba-2), 1 head of 16/16, decay a head, with a state"
