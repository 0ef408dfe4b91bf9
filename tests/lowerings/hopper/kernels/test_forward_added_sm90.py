"""Who brings what is added to the scores, and who reads it, run in PyTorch (gluon_in_torch.py)."""

from __future__ import annotations

import contextlib
import threading
import types
from typing import Any

import pytest
import torch

pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")

from attn_compiler.lowerings.hopper.kernels import forward_added_sm90
from tests.lowerings.shared.kernels import gluon_in_torch
from tests.lowerings.shared.kernels.gluon_in_torch import Pointer
from tests.lowerings.shared.kernels.proxies import Unfenced

BATCHES, HEADS, QUERIES, KEYS = 2, 3, 200, 256


def _how(*, stages: int, by_distance: bool = False) -> Any:
    return types.SimpleNamespace(ADDED_STAGES=stages, CONSUMERS=2, BLOCK_N=128, BY_DISTANCE=by_distance)


def _added(functions: dict[str, Any], bias: torch.Tensor, how: Any, zero: int = 0) -> Any:
    batches, heads, rows, columns = bias.shape
    adding = types.SimpleNamespace(
        batches=torch.tensor(batches), heads=torch.tensor(heads), rows=rows, columns=columns, zero=zero,
        **dict(zip(("stride_b", "stride_h", "stride_q"), bias.stride()[:3], strict=True)),
    )  # fmt: skip
    of = functions["descriptor_of_added"](Pointer(bias.view(-1)), adding, 64, how.BLOCK_N)
    tiles, full, empty = functions["room_for_added"](of, bias.dtype, how)
    return types.SimpleNamespace(of=of, at=adding, tiles=tiles, full=full, empty=empty)


def _brought(
    functions: dict[str, Any], added: Any, how: Any, *, head: int, start: int
) -> dict[int, list[torch.Tensor]]:
    """Of each warpgroup its tiles of a block, fetched while they are read."""
    found: dict[int, list[torch.Tensor]] = {0: [], 1: []}

    def read(consumer: int) -> None:
        for n in range(KEYS // 128):
            found[consumer].append(functions["added_of"](consumer, n, added, None, how))
            functions["let_go_of_added"](consumer, n, added, how)

    readers = [threading.Thread(target=read, args=(consumer,)) for consumer in found]
    for reader in readers:
        reader.start()
    for n in range(KEYS // 128):
        functions["fetch_added"](torch.tensor(1), torch.tensor(head), torch.tensor(start), n * 128, n, added, how)
    for reader in readers:
        reader.join()
    return found


@pytest.fixture
def functions() -> dict[str, Any]:
    return gluon_in_torch.scope(forward_added_sm90, (0,), (1,))


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("shape", [(BATCHES, HEADS), (1, HEADS), (BATCHES, 1), (1, 1)])
def test_each_warpgroup_gets_its_queries_of_a_bias(
    shape: tuple[int, int], stages: int, functions: dict[str, Any]
) -> None:
    bias = torch.randn(*shape, QUERIES, KEYS)
    how = _how(stages=stages)
    found = _brought(functions, _added(functions, bias, how), how, head=2, start=128)
    of_head = bias[min(1, shape[0] - 1), min(2, shape[1] - 1)]
    assert torch.equal(torch.cat(found[0], 1), of_head[128:192])
    # Beyond the last query it is 0.
    assert torch.equal(torch.cat(found[1], 1)[:8], of_head[192:])
    assert not torch.cat(found[1], 1)[8:].any()


def test_a_tile_by_distance_begins_at_its_first_key_and_query(functions: dict[str, Any]) -> None:
    columns = torch.arange(640.0).expand(1, 1, 64, 640).contiguous()
    how = _how(stages=1, by_distance=True)
    found = _brought(functions, _added(functions, columns, how, zero=320), how, head=0, start=128)
    for consumer, tiles in found.items():
        for n, tile in enumerate(tiles):
            assert float(tile[0, 0]) == n * 128 - (128 + 64 * consumer) + 320


@pytest.mark.parametrize("fenced", [True, False])
def test_a_tile_is_let_go_of_behind_a_fence(
    fenced: bool, functions: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Barriers order threads, not the copy engine."""
    if not fenced:
        monkeypatch.setitem(functions, "fence_async_shared", lambda: None)
    how = _how(stages=1)
    added = _added(functions, torch.randn(1, 1, QUERIES, KEYS), how)

    def fetch(n: int) -> None:
        functions["fetch_added"](torch.tensor(0), torch.tensor(0), torch.tensor(0), n * 128, n, added, how)

    def read(consumer: int) -> None:
        functions["added_of"](consumer, 0, added, None, how)
        functions["let_go_of_added"](consumer, 0, added, how)

    fetch(0)
    readers = [threading.Thread(target=read, args=(each,)) for each in range(2)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    with contextlib.nullcontext() if fenced else pytest.raises(Unfenced):
        fetch(1)
