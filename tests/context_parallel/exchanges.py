"""What ranks exchange, run in each process of a group (tests/distributed/processes.py)."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from attn_compiler import ContextParallel

BALANCES = ("head_tail", None)
LENGTH, DIMS = 8, (0, 1, -1)
DTYPES = (torch.float64, torch.bfloat16, torch.int64, torch.bool)
#: What a rank's losses are, and how many tokens it has: one has none.
TOTALS, COUNTS = (3.0, 0.0, 7.0, 2.5), (2, 0, 3, 1)
VOCABULARY, ROWS, TOKENS = 11, 2, 7


def of_two() -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2,))
    return {
        "unshard": {(balance, dim): _unshard(mesh, balance, dim) for balance in BALANCES for dim in DIMS},
        "dtypes": {dtype: _there_and_back(mesh, dtype) for dtype in DTYPES},
        "without padding": ContextParallel(mesh).unshard(torch.arange(4).view(1, 4) + 4 * dist.get_rank(), length=5),
        "mean": _mean(mesh),
        "compiled": _compiled(mesh),
        "step": {balance: _step(mesh, balance) for balance in BALANCES},
    }


def of_four() -> dict[str, Any]:
    """Two data-parallel groups of two, and one group of all."""
    meshes = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    all_four = init_device_mesh("cpu", (4,))
    return {
        "unshard": {(balance, 1): _unshard(all_four, balance, 1) for balance in BALANCES},
        "mean": _mean(all_four),
        "step": {"head_tail": _step(meshes["cp"], "head_tail", meshes.get_local_rank("dp"))},
        "step of all tokens": _step(meshes["cp"], "head_tail", 2 * meshes.get_local_rank("dp"), all_four),
    }


def whole(dim: int, dtype: torch.dtype = torch.float64) -> Tensor:
    shape = [2, 3, 5]
    shape[dim] = LENGTH
    return torch.randint(-50, 50, shape, generator=torch.Generator().manual_seed(0)).to(dtype)


def weights(dim: int, rank: int) -> Tensor:
    """What a rank makes of the whole sequence."""
    return whole(dim) + 100.0 * rank


def _unshard(mesh: DeviceMesh, balance: Any, dim: int) -> tuple[Tensor, Tensor]:
    """The whole sequence, and the gradient of this rank's part."""
    cp = ContextParallel(mesh, load_balance=balance)
    mine = whole(dim).index_select(dim, cp.positions(LENGTH // cp.size)).requires_grad_()
    found = cp.unshard(mine, dim)
    (found * weights(dim, cp.rank)).sum().backward()
    assert mine.grad is not None
    return found.detach(), mine.grad


def _there_and_back(mesh: DeviceMesh, dtype: torch.dtype) -> Tensor:
    """A part that is a view with strides of its own."""
    cp = ContextParallel(mesh)
    part = whole(1, dtype)[:, cp.positions(LENGTH // cp.size)].transpose(0, 2)
    return cp.unshard(part, 1).transpose(0, 2)


def _mean(mesh: DeviceMesh) -> dict[str, Tensor]:
    cp = ContextParallel(mesh)
    total = torch.tensor(TOTALS[cp.rank], requires_grad=True)
    found = {"mean": cp.mean(total, COUNTS[cp.rank])}
    found["mean"].backward()
    assert total.grad is not None
    found["gradient"] = total.grad
    two = torch.tensor([TOTALS[cp.rank], 1.0])
    found["of two losses"] = cp.mean(two, torch.tensor([COUNTS[cp.rank], 1]))
    found["of whole numbers"] = cp.mean(torch.tensor(cp.rank), torch.tensor([2]))
    # float32 has no 2**24 + 1.
    found["of many"] = cp.mean(torch.tensor(1.0, dtype=torch.float64), 2**24 + 1 if cp.rank == 0 else 0)
    return {name: x.detach() for name, x in found.items()}


def _compiled(mesh: DeviceMesh) -> tuple[Tensor, Tensor]:
    cp = ContextParallel(mesh)

    def loss(x: Tensor) -> Tensor:
        return cp.mean(cp.unshard(x.sin(), 1).square().sum(), 3)

    results = []
    for function in (loss, torch.compile(loss, backend="aot_eager", fullgraph=True)):
        x = whole(1)[:, cp.positions(LENGTH // 2)].requires_grad_()
        function(x).backward()
        assert x.grad is not None
        results.append(x.grad)
    return results[0], results[1]


def batch_of(group: int) -> dict[str, Tensor]:
    """Whole sequences of which some tokens count: as many in the groups 0 and 1, fewer in group 2."""
    ids = torch.randint(VOCABULARY, (ROWS, TOKENS), generator=torch.Generator().manual_seed(group))
    places = torch.arange(TOKENS)
    return {"input_ids": ids, "labels": ids.where(places > 3 if group == 2 else places != group + 2, -100)}


class Tokens(nn.Module):
    """Each token by itself, so that a part is computed as the whole is."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(VOCABULARY, 6, dtype=torch.float64)
        self.places = nn.Embedding(TOKENS + 1, 6, dtype=torch.float64)
        self.head = nn.Linear(6, VOCABULARY, dtype=torch.float64)

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        scores: Tensor = self.head((self.words(input_ids) + self.places(position_ids)).tanh())
        return scores


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def _step(mesh: DeviceMesh, balance: Any, group: int = 0, over: DeviceMesh | None = None) -> dict[str, Tensor]:
    """Loss and gradients of a step of data parallelism over all ranks. over: whose tokens the mean is of."""
    cp = ContextParallel(mesh, load_balance=balance)
    model = DistributedDataParallel(Tokens())
    batch = cp.shard(**batch_of(group))
    scores = model(batch["input_ids"], batch["position_ids"])
    targets = batch["shift_labels"]
    losses = cp if over is None else ContextParallel(over)
    loss = losses.mean(
        F.cross_entropy(scores.flatten(0, 1), targets.flatten(), reduction="sum"), (targets != -100).sum()
    )
    loss.backward()
    return {"loss": loss.detach(), "logits": cp.unshard(scores, length=TOKENS).detach(), **gradients(model.module)}
