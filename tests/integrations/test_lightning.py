"""Lightning and Fabric train a model that is compiled in place, as they train a plain one."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

import attn_compiler
from attn_compiler.integrations.transformers import compile_model
from tests.integrations import launching
from tests.integrations.launching import LAYERS, found, llama, prompts

STEPS = 3  # as in the recipe
_MASK = "9: causal ∧ key padding attention_mask[b, k] (proved)"


@pytest.fixture(scope="module")
def lightning() -> Iterator[Any]:
    """When it is imported, it puts a function of its own in the place of torch.compile: other tests don't run with that."""
    compile_of_torch = torch.compile
    yield pytest.importorskip("lightning")
    torch.compile = compile_of_torch


def _lit_model(lightning: Any) -> Any:
    class LitModel(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self, model: Any) -> None:
            super().__init__()
            self.model = model
            self.losses: list[Tensor] = []

        def training_step(self, batch: dict[str, Tensor], place: int) -> Tensor:
            loss: Tensor = self.model(**batch).loss
            self.log("loss", loss)
            self.losses.append(loss.detach())
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 0.1)

    return LitModel


def _batch() -> dict[str, Tensor]:
    return {**prompts(), "labels": prompts()["input_ids"]}


@pytest.mark.usefixtures("quick")
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
def test_a_model_inside_of_a_lightning_module(lightning: Any) -> None:
    lit_model = _lit_model(lightning)
    model = llama(use_cache=False).train()
    batches: Any = torch.utils.data.DataLoader([_batch()] * STEPS, batch_size=None)
    settings: Any = {"logger": False, "enable_checkpointing": False, "accelerator": "cpu"}
    plain = lit_model(copy.deepcopy(model))
    lightning.Trainer(max_steps=STEPS, **settings).fit(plain, batches)
    given = launching.run("Lightning", model=model, LitModel=lit_model, batches=batches)
    torch.testing.assert_close(given["module"].losses, plain.losses)
    assert len(plain.losses) == STEPS
    assert found(sites=LAYERS) == [_MASK]
    assert len(attn_compiler.reports()) == 1


@pytest.mark.usefixtures("lightning")
def test_fabric() -> None:
    from lightning.fabric import Fabric

    model = llama(use_cache=False).train()
    plain = copy.deepcopy(model)
    compile_model(model, options={"inner": "eager", "strict": True})
    fabric = Fabric(accelerator="cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("error", attn_compiler.AttnCompilerWarning)
        fitted, _ = fabric.setup(model, torch.optim.SGD(model.parameters(), 0.1))
        loss = fitted(**_batch()).loss
        fabric.backward(loss)
    wanted = plain(**_batch()).loss
    wanted.backward()
    torch.testing.assert_close(loss, wanted)
    for mine, right in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, right.grad)
    assert found(sites=LAYERS) == [_MASK]
