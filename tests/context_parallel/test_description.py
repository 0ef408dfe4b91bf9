from __future__ import annotations

import pytest
import torch

import attn_compiler
from attn_compiler.context_parallel import ContextParallel
from attn_compiler.reasons.errors import InvalidOption
from tests.meshes import fake_mesh


def test_it_asks_the_mesh() -> None:
    with fake_mesh(2, 4, rank=6, names=("dp", "cp")) as mesh:
        cp = attn_compiler.ContextParallel(mesh["cp"])
        assert (cp.size, cp.rank, cp.is_balanced) == (4, 2, True)
        assert cp.group_name == mesh["cp"].get_group().group_name
        # Ranks 4 to 7 share a sequence: this one has the chunks 2 and 5 of 8.
        assert cp.positions(6).tolist() == [6, 7, 8, 15, 16, 17]
        assert cp.positions(6).dtype == torch.int64


def test_one_rank_has_the_sequence_in_its_order() -> None:
    with fake_mesh(1) as mesh:
        assert not ContextParallel(mesh).is_balanced
        assert ContextParallel(mesh).positions(3).tolist() == [0, 1, 2]


def test_a_mesh_of_several_dimensions_is_refused_with_their_names() -> None:
    expected = r"of one dimension, not of 2: one of mesh\['dp'\], mesh\['cp'\]"
    with fake_mesh(2, 2, names=("dp", "cp")) as mesh, pytest.raises(InvalidOption, match=expected):
        ContextParallel(mesh)
    with fake_mesh(2, 2) as mesh, pytest.raises(InvalidOption, match="has no named dimensions"):
        ContextParallel(mesh)


def test_what_is_no_mesh_is_refused() -> None:
    with pytest.raises(InvalidOption, match=r"takes a torch\.distributed\.DeviceMesh of one dimension, got 'cp'"):
        ContextParallel("cp")  # type: ignore[arg-type]


def test_a_build_without_meshes_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_available", lambda: False)
    with pytest.raises(InvalidOption, match="this build of torch has not"):
        ContextParallel(None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("method", "rings", "one of 'auto', 'all_gather', 'all_to_all', 'ring', got 'rings'"),
        ("method", None, "one of 'auto'"),
        ("load_balance", "zigzag", "one of 'auto', 'head_tail', None"),
        ("load_balance", True, "one of 'auto', 'head_tail', None"),
        ("replicated", "image", "a tuple of names of model inputs"),
        ("replicated", (1,), "a tuple of names of model inputs"),
        ("allow", torch.ops.aten.cumsum.default, "a tuple of names of ops, as 'aten.cumsum.default'"),
        ("allow", (torch.ops.aten.cumsum.default,), "a tuple of names of ops"),
        ("packed", 1, "True or False, got 1"),
        ("gather_limit", -1, "a number of bytes, 0 or more, got -1"),
        ("gather_limit", True, "a number of bytes"),
        ("gather_limit", 1e9, "a number of bytes"),
    ],
)
def test_wrong_values_are_refused_and_named(name: str, value: object, expected: str) -> None:
    with fake_mesh(2) as mesh, pytest.raises(InvalidOption, match=f"'context_parallel: {name}' takes {expected}"):
        ContextParallel(mesh, **{name: value})  # type: ignore[arg-type]


def test_the_digest_has_everything_but_the_rank() -> None:
    digests = []
    for shape, rank, given in (
        ((2,), 0, {}),
        ((4,), 0, {}),
        ((2,), 0, {"method": "all_to_all"}),
        ((2,), 0, {"load_balance": None}),
        ((2,), 0, {"replicated": ["image"]}),
        ((2,), 0, {"allow": {"aten.cumsum.default"}}),
        ((2,), 0, {"packed": True}),
        ((2,), 0, {"gather_limit": 2**20}),
        ((2,), 0, {"method": "ring"}),
    ):
        with fake_mesh(*shape, rank=rank) as mesh:
            digests.append(ContextParallel(mesh, **given).digest)  # type: ignore[arg-type]
    assert len(set(digests)) == len(digests)
    with fake_mesh(2, rank=1) as mesh:
        assert ContextParallel(mesh).digest == digests[0]
        assert ContextParallel(mesh, load_balance="head_tail").digest == digests[0]


def test_groups_of_the_same_shape_differ() -> None:
    with fake_mesh(2, 2, names=("dp", "cp")) as mesh:
        dp, cp = ContextParallel(mesh["dp"]), ContextParallel(mesh["cp"])
        assert dp.digest != cp.digest
        assert dp != cp


def test_equal_where_all_that_matters_is() -> None:
    """torch.compile compares options to see whether a backend is another one."""
    with fake_mesh(2, 2, names=("dp", "cp")) as mesh:
        one, same = ContextParallel(mesh["cp"]), ContextParallel(mesh["cp"], load_balance="head_tail")
        assert one == same
        assert hash(one) == hash(same)
        assert one != ContextParallel(mesh["cp"], method="all_gather")
        assert one != "cp"
