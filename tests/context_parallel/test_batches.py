"""What each rank has of a batch. All ranks are looked at in one process: their parts, put together, are the padded batch."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from attn_compiler.context_parallel import batches
from attn_compiler.context_parallel.layout import Layout, joined
from attn_compiler.reasons.errors import ContextParallelInput

TWO = Layout(size=2, balanced=True)
layouts = st.builds(Layout, size=st.integers(1, 5), balanced=st.booleans())


def _ids(rows: int, length: int) -> Tensor:
    return torch.arange(1, rows * length + 1).view(rows, length)


def _whole(batch: Mapping[str, Any], layout: Layout, **settings: Any) -> dict[str, Any]:
    """The parts of all ranks, put together."""
    found = batches.whole(batch, layout, **settings)
    parts = [found.part(layout, rank) for rank in range(layout.size)]
    is_balanced = layout.chunks > layout.size

    def together(name: str) -> Any:
        if name not in found.axes:
            return parts[0][name]
        return joined(torch.stack([part[name] for part in parts]), found.axes[name], is_balanced)

    return {name: together(name) for name in parts[0]}


@given(layout=layouts, length=st.integers(1, 40), rows=st.integers(1, 3))
def test_parts_give_the_batch_back(layout: Layout, length: int, rows: int) -> None:
    """Lengths below the number of ranks among them."""
    ids = _ids(rows, length)
    batch = {
        "input_ids": ids,
        "labels": ids * 2,
        "token_type_ids": ids % 3,
        "inputs_embeds": torch.randn(rows, length, 2),
        "attention_mask": ids % 5 != 0,
        "position_ids": ids.expand(3, -1, -1) + 7,
        "weights": torch.rand(rows, length),
        "documents": ids // 4,
    }
    whole = _whole(batch, layout)
    padded = layout.padded(length)
    for name, x in batch.items():
        axis = 1 if x.is_floating_point() else -1
        assert whole[name].shape[axis] == padded
        assert whole[name].narrow(axis, 0, length).equal(x)
        assert whole[name].dtype == x.dtype
        rest = whole[name].narrow(axis, length, padded - length)
        if name == "position_ids":
            assert rest.equal(x[..., -1:] + torch.arange(1, padded - length + 1))
        else:
            assert (rest == (-100 if name == "labels" else 0)).all()
    assert whole["shift_labels"][:, : length - 1].equal(whole["labels"][:, 1:length])
    assert (whole["shift_labels"][:, length - 1 :] == -100).all()


@given(layout=layouts, length=st.integers(1, 40), rows=st.integers(1, 3), embeds=st.booleans())
def test_what_models_would_make_of_a_part_is_added(layout: Layout, length: int, rows: int, embeds: bool) -> None:
    batch = {"inputs_embeds": torch.randn(rows, length, 2)} if embeds else {"input_ids": _ids(rows, length)}
    whole = _whole(batch, layout)
    padded = layout.padded(length)
    assert whole.keys() == {*batch, "position_ids", "attention_mask"}
    assert whole["position_ids"].tolist() == [list(range(padded))] * rows
    assert whole["attention_mask"].tolist() == [[1] * length + [0] * (padded - length)] * rows


def test_one_rank_gets_the_tensors_themselves_and_what_is_added() -> None:
    batch = {"input_ids": _ids(2, 5), "labels": _ids(2, 5)}
    one = Layout(size=1, balanced=True)
    part = batches.whole(batch, one).part(one, 0)
    assert part["input_ids"] is batch["input_ids"]
    assert part["labels"] is batch["labels"]
    assert part["shift_labels"].tolist() == [[2, 3, 4, 5, -100], [7, 8, 9, 10, -100]]
    assert part["position_ids"].tolist() == [[0, 1, 2, 3, 4]] * 2


def test_ids_are_padded_with_what_was_asked_for() -> None:
    whole = _whole({"input_ids": _ids(1, 5), "documents": _ids(1, 5)}, TWO, pad_id=9)
    assert whole["input_ids"].tolist() == [[1, 2, 3, 4, 5, 9, 9, 9]]
    assert whole["documents"].tolist() == [[1, 2, 3, 4, 5, 0, 0, 0]]


def test_axes_that_names_and_dtypes_do_not_tell_are_given() -> None:
    batch = {"input_ids": _ids(2, 8), "spans": _ids(8, 2), "bias": torch.randn(2, 3, 8)}
    whole = batches.whole(batch, TWO, dims={"spans": 0, "bias": -1})
    part = whole.part(TWO, 0)
    assert part["spans"].equal(batch["spans"][[0, 1, 6, 7]])
    assert part["bias"].equal(batch["bias"][..., [0, 1, 6, 7]])


def test_a_batch_whose_first_axis_is_the_sequence() -> None:
    whole = _whole({"inputs_embeds": torch.randn(6, 2, 4)}, TWO, dims={"inputs_embeds": 0})
    assert whole["inputs_embeds"].shape == (8, 2, 4)
    assert whole["attention_mask"].tolist() == [[1] * 6 + [0] * 2]


def test_a_sequence_without_a_batch() -> None:
    whole = _whole({"input_ids": torch.arange(6)}, TWO)
    assert whole["position_ids"].tolist() == list(range(8))
    assert whole["attention_mask"].tolist() == [1] * 6 + [0] * 2


def test_what_every_rank_has_goes_through() -> None:
    pixels, mask = torch.randn(2, 3, 7, 7), torch.ones(2, 1, 8, 8)
    others = {"pixels": pixels, "attention_mask": mask, "use_cache": False, "scale": 0.5, "task": "x", "past": None}
    others["num_items_in_batch"] = torch.tensor(3)
    whole = batches.whole({"input_ids": _ids(2, 8), **others}, TWO, replicated=("pixels", "attention_mask"))
    part = whole.part(TWO, 1)
    assert part.keys() == {"input_ids", "position_ids", *others}
    assert all(part[name] is value for name, value in others.items())


def test_what_is_replicated_is_not_added() -> None:
    names = ("position_ids", "attention_mask", "shift_labels")
    assert batches.whole({"labels": _ids(2, 8)}, TWO, replicated=names).part(TWO, 0).keys() == {"labels"}


def test_none_is_missing() -> None:
    part = batches.whole({"input_ids": _ids(1, 8), "position_ids": None, "attention_mask": None}, TWO).part(TWO, 1)
    assert part["position_ids"].tolist() == [[2, 3, 4, 5]]
    assert part["attention_mask"].tolist() == [[1] * 4]


def test_shifted_labels_that_are_given_are_kept() -> None:
    whole = _whole({"labels": _ids(1, 8), "shift_labels": _ids(1, 8) + 50}, TWO)
    assert whole["shift_labels"].equal(_ids(1, 8) + 50)


def test_labels_that_are_no_classes_are_not_shifted() -> None:
    batch = {"inputs_embeds": torch.randn(2, 8, 2), "labels": torch.randn(2, 8)}
    assert "shift_labels" not in batches.whole(batch, TWO).tensors


@pytest.mark.parametrize("layout", [TWO, Layout(size=3, balanced=False)])
def test_gradients_go_back_through_embeddings(layout: Layout) -> None:
    x = torch.randn(2, 7, 3, dtype=torch.float64, requires_grad=True)
    factors = torch.arange(1, 15, dtype=torch.float64).view(2, 7, 1)
    whole = batches.whole({"inputs_embeds": x, "factors": factors}, layout)
    for rank in range(layout.size):
        part = whole.part(layout, rank)
        (part["inputs_embeds"] * part["factors"]).sum().backward(retain_graph=True)
    assert x.grad is not None
    assert x.grad.equal(factors.expand(2, 7, 3))


def test_multimodal_positions_of_text_may_go_anywhere_between() -> None:
    """Rows of rotary positions repeat within an image; the row of the text's, which some models put first, says what is one document."""
    rotary = torch.tensor([0, 1, 1, 1, 2, 3, 4, 5]).expand(3, 2, 8)
    text = torch.arange(8).expand(1, 2, 8)
    for positions in (rotary, torch.cat([text, rotary])):
        whole = _whole({"input_ids": _ids(2, 8), "position_ids": positions}, TWO)
        assert whole["position_ids"].equal(positions)
    with pytest.raises(ContextParallelInput, match="do not start again"):
        batches.whole({"input_ids": _ids(2, 8), "position_ids": torch.cat([rotary[:1], rotary])}, TWO)


def test_packed_documents_are_no_one_document() -> None:
    """Without a mask models of transformers take such positions for documents, with one they do not."""
    batch = {"input_ids": _ids(1, 8), "position_ids": torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]])}
    with pytest.raises(ContextParallelInput, match="do not start again in a row; got positions that do"):
        batches.whole(batch, TWO)
    with pytest.raises(ContextParallelInput, match="packed=True"):
        # A model that finds documents around its layers would find one in each rank's part.
        batches.whole(batch, TWO, replicated=("attention_mask",))
    with_mask = batches.whole({**batch, "attention_mask": torch.ones(1, 8)}, TWO)
    assert with_mask.tensors["position_ids"] is batch["position_ids"]


def test_packed_documents_are_cut_with_their_positions_and_no_mask() -> None:
    batch = {"input_ids": _ids(1, 7), "position_ids": torch.tensor([[0, 1, 2, 0, 0, 1, 2]])}
    whole = batches.whole(batch, TWO, packed=True).tensors
    assert whole["position_ids"].tolist() == [[0, 1, 2, 0, 0, 1, 2, 0]]
    assert "attention_mask" not in whole
    with pytest.raises(ContextParallelInput, match=r"shard\(position_ids=\).*where documents begin"):
        batches.whole({"input_ids": _ids(1, 7)}, TWO, packed=True)


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "4-D mask": (
        {"input_ids": _ids(2, 8), "attention_mask": torch.ones(2, 1, 8, 8, dtype=torch.bool)},
        {},
        r"shard\(attention_mask=\): it is a padding mask of \(B, S\).*got a tensor of \(2, 1, 8, 8\)",
    ),
    "masks by kind": (
        {"input_ids": _ids(2, 8), "attention_mask": {"full_attention": torch.ones(2, 8)}},
        {},
        r"shard\(attention_mask=\): it is a padding mask of \(B, S\).*got a dict",
    ),
    "another length": (
        {"input_ids": _ids(2, 8), "labels": _ids(2, 7), "token_type_ids": _ids(2, 8)},
        {},
        r"got input_ids 8 \(axis 1 of \(2, 8\)\), labels 7 \(axis 1 of \(2, 7\)\).*dims=\{'labels': ...\}",
    ),
    "pixels": (
        {"input_ids": _ids(2, 8), "pixel_values": torch.randn(2, 3, 8, 8)},
        {},
        r"pixel_values 3 \(axis 1 of \(2, 3, 8, 8\)\).*replicated=\('pixel_values',\)",
    ),
    "labels of rows": (
        {"input_ids": _ids(8, 8), "labels": torch.arange(8)},
        {},
        r"shard\(labels=\): beside tensors of rows, one of a single axis may be .*got input_ids \(8, 8\), labels \(8,\)",
    ),
    "floats of one axis": (
        {"input_ids": _ids(2, 8), "x": torch.rand(8)},
        {},
        r"shard\(x=\): .*is \(B, S, ...\); got a tensor of \(8,\)",
    ),
    "no such axis": (
        {"input_ids": _ids(2, 8)},
        {"dims": {"input_ids": 2}},
        r"an axis 2, as dims= says; got a tensor of \(2, 8\)",
    ),
    "dims of nothing": (
        {"input_ids": _ids(2, 8)},
        {"dims": {"ids": 0}},
        r"shard\(ids=\): dims= names .*There are input_ids",
    ),
    "lists": (
        {"input_ids": [[1, 2], [3, 4]]},
        {},
        r"shard\(input_ids=\): what is cut is a tensor; got a list.*replicated=\('input_ids',\)",
    ),
    "a cache": (
        {"input_ids": _ids(2, 8), "past_key_values": SimpleNamespace()},
        {},
        r"shard\(past_key_values=\): .*got a SimpleNamespace",
    ),
    "nothing": ({"use_cache": False}, {}, r"shard\(\): one tensor along the sequence is there; got none"),
    "nothing in it": ({"input_ids": _ids(2, 0)}, {}, "a sequence has positions; got none"),
    "without padding": (
        {"input_ids": _ids(2, 5)},
        {"pad": False},
        "a multiple of 4; got 5. The next length that can be cut is 8",
    ),
    "a whole mask": (
        {"input_ids": _ids(2, 5), "attention_mask": torch.ones(2, 5)},
        {"replicated": ("attention_mask",)},
        r"shard\(attention_mask=\): what is padded is masked out.*got a length of 5, of which the next multiple of 4 is 8",
    ),
    "labels that are numbers": (
        {"inputs_embeds": torch.randn(2, 5, 2), "labels": torch.randn(2, 5)},
        {},
        r"shard\(labels=\): padded labels are left out.*got torch.float32, and a length of 5. Give sequences of 8",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_can_not_be_cut_is_refused(case: str) -> None:
    batch, settings, expected = REFUSED[case]
    with pytest.raises(ContextParallelInput, match=expected):
        batches.whole(batch, TWO, **settings)


@pytest.mark.parametrize("length", [4, 8, 12])
def test_lengths_that_fit_need_no_padding(length: int) -> None:
    assert batches.whole({"input_ids": _ids(2, length)}, TWO, pad=False).tensors["input_ids"].shape == (2, length)
