"""What is private to PyTorch in caching: its switches, its state, and files that come along with its artifacts."""

from __future__ import annotations

import json
import operator
from pathlib import Path

import pytest
import torch
from torch.compiler._cache import CacheArtifactManager

from attn_compiler.torch_private import caches as torch_caches, inductor as torch_inductor


def test_inductors_switches_and_users_patches_of_them() -> None:
    on = {"fx_graph_cache": True, "force_disable_caches": False}
    assert torch_caches.are_wanted(on)
    assert not torch_caches.are_wanted({**on, "fx_graph_cache": False})
    assert not torch_caches.are_wanted({**on, "force_disable_caches": True})
    with torch._inductor.config.patch(on):
        assert torch_caches.are_wanted({})
    with torch._inductor.config.patch({**on, "force_disable_caches": True}):
        assert not torch_caches.are_wanted({})


def test_the_state_is_plain_and_the_same_when_asked_again() -> None:
    state = torch_caches.state([torch.device("cpu")])
    assert json.loads(json.dumps(state)) == state == torch_caches.state([torch.device("cpu")])


def test_the_state_names_modes() -> None:
    before = torch_caches.state([])
    with torch.device("meta"):
        inside = torch_caches.state([])
    assert before["modes"] != inside["modes"]
    assert before["default"] != inside["default"]


@pytest.mark.parametrize("part", ["cuda.matmul", "cudnn.conv", "cudnn.rnn", "mkldnn.matmul"])
def test_the_state_is_known_where_precisions_are_set_one_by_one(part: str) -> None:
    """PyTorch's functions for all of them raise then."""
    before, owner = torch_caches.state([]), operator.attrgetter(part)(torch.backends)
    precision = owner.fp32_precision
    try:
        owner.fp32_precision = "tf32" if precision == "ieee" else "ieee"
        assert torch_caches.state([])["precision"] != before["precision"]
    finally:
        owner.fp32_precision = precision
    assert torch_caches.state([]) == before


def test_a_file_that_comes_along_is_written_where_it_was(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    data = {"key": "a", "rewrite": [1, "ü", None]}
    with CacheArtifactManager.with_fresh_cache():
        torch_caches.carry("some/folder/a.json", data)
        saved = torch.compiler.save_cache_artifacts()
    assert saved is not None
    assert torch.compiler.load_cache_artifacts(saved[0]) is not None
    path = torch_inductor.cache_folder() / "some/folder/a.json"
    assert path.read_bytes() == torch_caches.content(data)
