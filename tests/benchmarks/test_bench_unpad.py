from __future__ import annotations

import pytest
import torch

from benchmarks import bench_unpad


@pytest.mark.parametrize("fill", [0.25, 0.5, 0.75, 1.0])
def test_padding_has_the_fill_that_is_asked_for(fill: float) -> None:
    mask = bench_unpad.padding(32, 512, fill)
    assert mask.shape == (32, 512)
    assert float(mask.float().mean()) == pytest.approx(fill, abs=0.01)
    assert bool((mask[:, :-1] >= mask[:, 1:]).all())


def test_labels_are_ignored_at_padding() -> None:
    half = bench_unpad.batches(4, 16, 100, labels=True)["0.5"]
    assert bool((half["labels"][half["attention_mask"] == 0] == -100).all())
    assert bool((half["labels"][half["attention_mask"] == 1] >= 0).all())


def test_differences_are_those_of_real_tokens() -> None:
    mask = torch.tensor([[1, 0]])
    expected = torch.ones(1, 2, 3)
    found = expected.clone()
    found[0, 1] = 9
    assert bench_unpad._apart(found, expected, mask) == 0
    found[0, 0, 0] = 2
    assert bench_unpad._apart(found, expected, mask) == 1
