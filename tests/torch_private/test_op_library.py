from __future__ import annotations

from typing import Any

import pytest
import torch

from attn_compiler.torch_private import op_library

OURS = torch.ops.attn_compiler


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers is forgotten as a body, though PyTorch keeps the op."""
    monkeypatch.setattr(op_library, "BODIES", dict(op_library.BODIES))
    monkeypatch.setattr(op_library, "NOTING", dict(op_library.NOTING))


def test_a_body_is_imported_by_its_first_call() -> None:
    late = op_library.Late("attn_compiler.nowhere", "forward")
    with pytest.raises(ModuleNotFoundError):
        late(1)
    assert op_library.Late("operator", "add")(1, 2) == 3


@pytest.mark.usefixtures("registered")
def test_only_a_late_body_is_called_directly_and_only_one_that_notes_is_noted() -> None:
    schema = "(Tensor x) -> Tensor"
    bodies: dict[str, Any] = {
        "tried_noting": op_library.Late("torch", "neg", notes=True),
        "tried_late": op_library.Late("torch", "neg"),
        "tried_plain": torch.neg,
    }
    for name, body in bodies.items():
        op_library.define(name, schema, body, "CompositeExplicitAutograd")
        assert getattr(OURS, name)(torch.ones(2)).tolist() == [-1.0, -1.0]
    assert {name for name in bodies if name in op_library.BODIES} == {"tried_noting", "tried_late"}
    found = {name: op_library.launching_body(getattr(OURS, name).default) for name in bodies}
    assert found == {"tried_noting": bodies["tried_noting"], "tried_late": None, "tried_plain": None}


def test_what_is_no_op_of_ours_has_no_body() -> None:
    assert op_library.launching_body(torch.ops.aten.add.Tensor) is None
    assert op_library.launching_body(len) is None


@pytest.mark.usefixtures("registered")
def test_a_helper_is_registered_once_and_runs_on_fakes() -> None:
    for factor in (2, 3):

        def times(x: torch.Tensor, factor: int = factor) -> torch.Tensor:
            return x * factor

        op_library.register_helper("tried_helper", "(Tensor x) -> Tensor", function=times, notes=True)
    assert OURS.tried_helper(torch.ones(2)).tolist() == [2.0, 2.0]
    assert OURS.tried_helper(torch.ones(2, 3, device="meta")).shape == (2, 3)
    body = op_library.launching_body(OURS.tried_helper.default)
    assert body is not None
    assert body(torch.ones(1)).item() == 2.0


@pytest.mark.usefixtures("registered")
def test_a_helper_may_have_a_gradient_of_its_own() -> None:
    def keep(ctx: Any, inputs: tuple[torch.Tensor], output: torch.Tensor) -> None:
        ctx.save_for_backward(*inputs)

    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return grad * x * 10

    op_library.register_helper(
        "tried_square", "(Tensor x) -> Tensor", function=torch.square, differentiated=(keep, backward)
    )
    x = torch.tensor([3.0], requires_grad=True)
    OURS.tried_square(x).backward(torch.tensor([1.0]))
    assert x.grad is not None
    assert x.grad.item() == 30.0


@pytest.mark.parametrize(("exact", "tag"), [(True, torch.Tag.needs_exact_strides), (False, torch.Tag.flexible_layout)])
@pytest.mark.usefixtures("registered")
def test_a_helper_says_which_strides_it_takes(exact: bool, tag: torch.Tag) -> None:
    name = f"tried_strides_{exact}".lower()
    op_library.register_helper(name, "(Tensor x) -> Tensor", function=torch.neg, exact_strides=exact)
    assert tag in getattr(OURS, name).default.tags
