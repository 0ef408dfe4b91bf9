"""What is decided of a site before a node is made: whose backward it has, and the tiles that lists are made for."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from attn_compiler.lowerings.hopper.call import backward_of, call_of, why_not_in_order
from attn_compiler.lowerings.hopper.lowering import HopperAttention
from attn_compiler.lowerings.hopper.plan import blocks_of, grad_blocks_of
from attn_compiler.lowerings.shared.parts import tile_table
from attn_compiler.spec.target import Target
from tests.lowerings.specs import CAUSAL, bias, dense, make_spec

HOPPER = HopperAttention()
H200 = Target.fake()
DETERMINISTIC = Target.fake(deterministic=True)
#: of each key alone, which this family's backward reads
KEYS = dense(2, 1, 1, 2048)

_LONG: dict[str, Any] = {"dtype": "bfloat16", "seqlen_q": 2048, "seqlen_kv": 2048, "head_dim": 128}


def test_cudnns_backward_takes_no_gradient_of_the_lse() -> None:
    assert backward_of(make_spec(**_LONG), H200) == "sdpa_cudnn"
    differentiated = make_spec(**_LONG, lse="differentiated")
    assert HOPPER.why_not(differentiated, H200) == []
    assert backward_of(differentiated, H200) == "hopper"


def test_the_backward_is_its_own_where_it_is_the_fastest() -> None:
    assert backward_of(make_spec(mask=CAUSAL, **_LONG), H200) == "hopper"
    assert backward_of(make_spec(mask=KEYS, **_LONG), H200) == "hopper"
    assert backward_of(make_spec(**_LONG), H200) == "sdpa_cudnn"
    assert backward_of(make_spec(mask=CAUSAL, **_LONG | {"seqlen_q": 512, "seqlen_kv": 512}), H200) == "sdpa_cudnn"
    assert backward_of(make_spec(**_LONG), Target.fake(cudnn=0)) == "hopper"


def test_wide_heads_have_the_backward_of_another_family() -> None:
    wide = _LONG | {"head_dim": 256}
    assert backward_of(make_spec(mask=CAUSAL, **wide), Target.fake(torch="2.11.0")) == "sdpa_cudnn"
    assert backward_of(make_spec(mask=dense(2, 1, 2048, 2048), **wide), H200) == "triton"


@pytest.mark.parametrize("target", [H200, DETERMINISTIC])
@pytest.mark.parametrize("head_dim", [320, 512])
def test_head_dims_above_256_have_three_passes_of_its_own(head_dim: int, target: Target) -> None:
    wide = _LONG | {"head_dim": head_dim}
    spec = make_spec(mask=CAUSAL, **wide)
    assert backward_of(spec, target) == "hopper"
    tiles = call_of(spec, target).grad_tiles
    assert tiles is not None
    assert (tiles.forward, tiles.grad_kv.queries, tiles.grad_kv.keys) == (blocks_of(spec).tile, 64, 128)


@pytest.mark.parametrize("target", [H200, DETERMINISTIC])
def test_wide_heads_that_were_not_measured_have_the_triton_kernels_backward(target: Target) -> None:
    wide = _LONG | {"head_dim": 512}
    held = bias(1, 8, 2048, 2048, requires_grad=False)
    for given in ({"mask": dense(2, 1, 2048, 2048)}, {"changes": (held,)}, {"mask": CAUSAL, "head_dim": 264}):
        assert backward_of(make_spec(**wide | given), target) == "triton"


@pytest.mark.parametrize("target", [H200, DETERMINISTIC])
def test_learned_biases_have_the_backward_of_another_family(target: Target) -> None:
    assert backward_of(make_spec(changes=(bias(1, 8, 2048, 2048),), **_LONG), target) == "triton"


@pytest.mark.parametrize(("dtype", "family"), [("bfloat16", "hopper"), ("float16", "hopper"), ("float32", "triton")])
def test_biases_in_half_precision_that_want_no_gradient_have_its_own_backward(dtype: str, family: str) -> None:
    held = bias(1, 8, 2048, 2048, dtype=dtype, requires_grad=False)
    assert backward_of(make_spec(changes=(held,), **_LONG), H200) == family
    assert backward_of(make_spec(changes=(held,), **_LONG), DETERMINISTIC) == "triton"


def test_dense_masks_have_its_own_backward() -> None:
    assert backward_of(make_spec(mask=dense(2, 1, 2048, 2048), **_LONG), H200) == "hopper"
    assert backward_of(make_spec(mask=dense(2, 1, 2048, 2048), **_LONG), DETERMINISTIC) == "triton"


def test_values_that_are_wider_than_keys_have_the_backward_of_another_family() -> None:
    """dv leaves from a place in shared memory that is as large as a tile of q."""
    wide = _LONG | {"head_dim": 64, "head_dim_v": 128}
    mask = KEYS
    assert backward_of(make_spec(mask=mask, **wide), H200) == "triton"
    assert backward_of(make_spec(mask=mask, **wide | {"head_dim": 72}), H200) == "hopper"
    assert backward_of(make_spec(mask=mask, **wide | {"head_dim": 128, "head_dim_v": 64}), H200) == "hopper"


def test_a_deterministic_backward_adds_up_in_one_order_where_that_is_faster() -> None:
    many = _LONG | {"batch": 8, "heads": 16, "heads_kv": 16}
    assert backward_of(make_spec(mask=CAUSAL, **many), DETERMINISTIC) == "hopper_in_order"
    assert backward_of(make_spec(mask=CAUSAL, **many | {"batch": 1}), DETERMINISTIC) == "triton"
    assert backward_of(make_spec(**many), DETERMINISTIC) == "triton"
    assert backward_of(make_spec(mask=CAUSAL, **many | {"head_dim": 256}), DETERMINISTIC) == "triton"
    assert why_not_in_order(make_spec(**many), H200) == []
    assert why_not_in_order(make_spec(**many | {"head_dim": 256}), DETERMINISTIC) == []


def test_cudnns_backward_reads_no_repeated_axes() -> None:
    spec = make_spec(**_LONG)
    repeated = dataclasses.replace(spec.k, strides=(0, *spec.k.strides[1:]))
    assert backward_of(spec, H200) == "sdpa_cudnn"
    assert backward_of(dataclasses.replace(spec, k=repeated), H200) == "hopper"


def test_lists_are_made_for_the_tiles_of_whoever_reads_them() -> None:
    spec = make_spec(mask=CAUSAL, **_LONG)
    of_triton = tile_table.tiles(spec, H200)
    own = call_of(spec, H200)
    assert own.tiles.forward == blocks_of(spec).tile != of_triton.forward
    assert own.grad_tiles is not None
    assert own.grad_tiles.grad_kv == grad_blocks_of(spec).tile != of_triton.grad_kv
    assert call_of(make_spec(mask=CAUSAL, **_LONG | {"head_dim": 256}), DETERMINISTIC).grad_tiles is not None
    assert call_of(make_spec(**_LONG), H200).grad_tiles is None


def test_without_gradients_no_backward_is_decided() -> None:
    call = call_of(make_spec(mask=CAUSAL, needs_grad=False, **_LONG), DETERMINISTIC)
    assert (call.backward, call.grad_tiles, call.not_in_order) == (None, None, ())
