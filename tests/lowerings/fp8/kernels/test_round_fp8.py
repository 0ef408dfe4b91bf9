"""The kernels that round, compiled for Hopper and in the interpreter; their descriptors."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from attn_compiler.lowerings.fp8 import rounding
from attn_compiler.lowerings.fp8.kernels import mean_fp8, rotation
from tests.lowerings.fp8.kernels import compiling_round
from tests.lowerings.fp8.kernels.compiling_round import HEAD_DIMS, Found
from tests.lowerings.fp8.kernels.descriptors import from_nowhere, unset
from tests.lowerings.kernel_problems import DEVICE
from tests.lowerings.shared.kernels.compilers import of_a_known_compiler, printed_by

pytest.importorskip("triton")

# Compiled for Hopper, the kernels that round read whole vectors and keep all in registers.

#: bytes of a thread, of head dims up to 128: some words where registers are few
SPILLED = {"plain": 32, "accurate": 64, "accurate, shift": 96, "plain, seen": 32, "accurate, seen": 64}
#: of a program, so that two share a multiprocessor, each with 1 KB of its own
SHARED = 228 * 1024 // 2 - 1024


@pytest.fixture(scope="module")
def compiled() -> dict[str, Found]:
    return {each["name"]: Found(**each) for each in printed_by(compiling_round)}


@pytest.mark.in_turns
@of_a_known_compiler
@pytest.mark.parametrize("kind", ["plain", "plain, seen"])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_numbers_travel_in_vectors_and_stay_in_registers(head_dim: int, kind: str, compiled: dict[str, Found]) -> None:
    rounding, looking = compiled[f"round {kind} {head_dim}"], compiled[f"look {kind} {head_dim}"]
    assert max(rounding.spilled, looking.spilled) <= SPILLED[kind]
    assert (rounding.loads, rounding.stores, looking.loads) == (".v4", ".v4", ".v4")


@of_a_known_compiler
@pytest.mark.parametrize("kind", ["accurate", "accurate, shift", "accurate, seen"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_rotations_are_the_tensor_cores_and_stay_in_registers(
    head_dim: int, kind: str, compiled: dict[str, Found]
) -> None:
    rounding, looking = compiled[f"round {kind} {head_dim}"], compiled[f"look {kind} {head_dim}"]
    assert rounding.spilled <= SPILLED[kind]
    assert looking.spilled == 0
    assert (rounding.loads, rounding.stores, looking.loads) == (".v4", ".v4", ".v4")
    assert min(rounding.on_tensor_cores, looking.on_tensor_cores) > 0
    assert rounding.shared <= SHARED


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_no_register_of_fp8_is_packed_and_taken_apart(head_dim: int, compiled: dict[str, Found]) -> None:
    """ptxas 12.8 takes such a register apart before it has packed it, in loops the one of the turn before: on a GPU what came of it was
    wrong, and in an interpreter right."""
    assert compiled[f"round shift {head_dim}"].repacked == 0


@of_a_known_compiler
def test_the_widest_fit_shared_memory_of_other_gpus_too(compiled: dict[str, Found]) -> None:
    """100 KB, of sm89 and sm120."""
    names = ("round accurate, shift 256", "look accurate, shift 256")
    assert max(compiled[name].shared for name in names) <= 99 * 1024


@of_a_known_compiler
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_sums_are_read_in_vectors(head_dim: int, compiled: dict[str, Found]) -> None:
    assert compiled[f"sums {head_dim}"].loads == ".v4"
    assert max(compiled[f"{name} {head_dim}"].spilled for name in ("sums", "mean")) == 0


LOOPS = """
        /*0000*/                   UMOV UR4, UR9 ;                                 /* 0x1 */
        /*0010*/              @!P0 BRA 0x50 ;                                      /* 0x1 */
        /*0020*/                   UIADD3.64 UR6, UR4, 0x2, URZ ;                  /* 0x1 */
        /*0030*/                   UMOV UR5, URZ ;                                 /* 0x1 */
        /*0040*/                   BRA 0x70 ;                                      /* 0x1 */
        /*0050*/                   {} ;                      /* 0x1 */
        /*0060*/                   UMOV UR5, URZ ;                                 /* 0x1 */
        /*0070*/                   QGMMA.64x128x32.F32.E4M3.E4M3 R24, {}gdesc[UR4], R24 ; /* 0x1 */
        /*0080*/               @P1 BRA 0x70 ;                                      /* 0x1 */
        /*0090*/                   EXIT ;                                          /* 0x1 */
"""


def test_what_one_path_has_not_set_is_found() -> None:
    assert unset(LOOPS.format("UIADD3.64 UR6, UR2, 0x2, URZ", "")) == []
    for other in ("NOP", "UIMAD UR6, UR2, UR3, URZ", "@P2 UIADD3.64 UR6, UR4, 0x2, URZ"):
        for first in ("", "R88, "):
            found = unset(LOOPS.format(other, first))
            assert found
            assert all("0x70 QGMMA" in each and "UR6 <-" in each for each in found[:1])


def test_a_first_operand_in_registers_has_no_descriptor() -> None:
    code = LOOPS.format("UIADD3.64 UR6, UR2, 0x2, URZ", "R88, ").replace("UMOV UR5, URZ", "NOP")
    assert unset(code) == []
    assert unset(code.replace("R88, ", "")) != []


def test_what_was_kept_elsewhere_and_is_back_is_what_it_was() -> None:
    """In front of the product that another path goes around, its register is kept, used for something else, and set back."""
    code = """
        /*0000*/                   R2UR UR6, R3 ;                                  /* 0x1 */
        /*0010*/                   CS2R.32 UR4, SRZ ;                              /* 0x1 */
        /*0020*/              @!P0 BRA 0x60 ;                                      /* 0x1 */
        /*0030*/                   {} ;                                  /* 0x1 */
        /*0040*/                   UIADD3.64 UR6, UR4, 0x2, URZ ;                  /* 0x1 */
        /*0050*/                   R2UR UR6, R8 ;                                  /* 0x1 */
        /*0060*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], R24 ;  /* 0x1 */
        /*0070*/                   EXIT ;                                          /* 0x1 */
"""
    said = [each for each in unset(code.format("MOV R8, UR6")) if "UR6 <-" in each]
    assert said == []
    for other in ("MOV R8, UR7", "MOV R9, UR6", "@P1 MOV R8, UR6", "LDS R8, [R2]"):
        assert [each for each in unset(code.format(other)) if "UR6 <- ['R2UR UR6, R3', 'R2UR UR6, R8']" in each]


ADDED = """
        /*0000*/                   LDC R1, c[0x0][0x28] ;                          /* 0x1 */
        /*0010*/                   S2UR UR4, SR_CgaCtaId ;                         /* 0x1 */
        /*0020*/                   {} ;                          /* 0x1 */
        /*0030*/                   UIADD3.X UR7, UR5, 0x40000040, URZ, UP0, !UPT ; /* 0x1 */
        /*0040*/                   R2UR UR4, R1 ;                                  /* 0x1 */
        /*0050*/                   HGMMA.64x16x16.F32.BF16 R88, R28, gdesc[UR4].tnspB, R88 ; /* 0x1 */
        /*0060*/                   EXIT ;                                          /* 0x1 */
"""


def test_a_step_from_what_nothing_set_is_found() -> None:
    """The address that the step is added to: set, not set, and the stack pointer."""
    code = ADDED.replace("UR5", "UR4")
    assert from_nowhere(code.format("UIADD3 UR6, UP0, UR4, 0x20, URZ")) == []
    assert any("UR6 <- UIADD3 UR6" in each for each in from_nowhere(code.format("UIADD3 UR6, UP0, UR6, 0x20, URZ")))
    assert any("UR5 <- UIADD3.X UR7, UR5" in each for each in from_nowhere(ADDED.format("UMOV UR6, UR4")))
    assert any("R1 <- R2UR UR6, R1" in each for each in from_nowhere(code.format("R2UR UR6, R1")))


def test_what_is_fetched_is_not_followed() -> None:
    assert from_nowhere(ADDED.replace("UR5", "UR4").format("LDS UR6, [R77]")) == []


# Rows times H / √D with H of ±1, and which of them are finite.
ROWS, LENGTH = 32, 30


@triton.jit
def _turn(X, Mean, Seen, Product, Largest, Signs, length, N: tl.constexpr, HEAD_DIM: tl.constexpr):
    dims = tl.arange(0, HEAD_DIM)[None, :]
    turning = rotation.signs(HEAD_DIM, X.dtype.element_ty)
    mean = None if Mean is None else tl.load(Mean + dims)
    product = rotation.load_rotated(X, mean, Seen, turning, 0, length, HEAD_DIM, N, HEAD_DIM)
    product, largest = rotation.finite_rows(product, 0, length, -1.0)
    tl.store(Product + tl.arange(0, N)[:, None] * HEAD_DIM + dims, product)
    tl.store(Largest, largest)
    at = tl.arange(0, 16)[:, None]
    tl.store(Signs + at * HEAD_DIM + dims, rotation.signs_of(at, dims, tl.float32))


# The interpreter multiplies the bit patterns of bfloat16 (https://github.com/triton-lang/triton/issues/11584).
@pytest.mark.parametrize("dtype", [torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)])
@pytest.mark.parametrize("has_mean", [False, True])
@pytest.mark.parametrize("head_dim", [16, 64, 128, 256])
def test_rows_are_those_times_h(head_dim: int, has_mean: bool, dtype: torch.dtype) -> None:
    x = torch.randn(ROWS, head_dim, device=DEVICE).to(dtype)
    x[3, 1], x[4, 2], x[5, 3], x[5, 4] = torch.nan, -torch.inf, torch.inf, torch.inf
    x[LENGTH:], x[7], x[8] = 100.0, torch.nan, 1e4
    mean = torch.randn(head_dim, device=DEVICE) if has_mean else None
    product, largest = torch.empty(ROWS, head_dim, device=DEVICE), torch.empty(1, device=DEVICE)
    signs, seen = torch.empty(16, head_dim, device=DEVICE), torch.ones(LENGTH, dtype=torch.uint8, device=DEVICE)
    seen[7:9] = 0
    _turn[1,](x, mean, seen, product, largest, signs, LENGTH, N=ROWS, HEAD_DIM=head_dim)
    h = rounding.signs(head_dim, x.double())
    assert torch.equal(signs.double(), h[:16])
    right = x.double() @ h / head_dim**0.5 - (0.0 if mean is None else mean.double())
    right[3:6], right[7:9] = -1.0, 0.0
    torch.testing.assert_close(product[:LENGTH].double(), right[:LENGTH], rtol=1e-4, atol=1e-4)
    finite = torch.cat((right[:3], right[6:LENGTH])).abs().max()
    torch.testing.assert_close(largest[0].double(), finite, rtol=1e-4, atol=1e-4)


# Sums of parts, and the sum of those.
B, H, S, D = 2, 3, 100, 48
PART, PARTS = 16, 2


def test_each_part_sums_what_is_finite_of_its_own() -> None:
    x = torch.randn(B, S, H, D, device=DEVICE).half().transpose(1, 2)
    x[1, 2, 40, 3], x[0, 0, 0, 0], x[1, :, 50] = torch.nan, -torch.inf, 3e4
    seen = torch.ones(B, S, dtype=torch.uint8, device=DEVICE)
    seen[1, 50] = 0
    parts = triton.cdiv(S, PART * PARTS)
    sums = torch.full((B, H, parts, D), torch.nan, device=DEVICE)
    mean_fp8.sums_fp8[parts * H * B,](
        x, seen, sums, *x.stride()[:3], S, H, S, parts, PARTS=PARTS, PART=PART, HEAD_DIM=D, WIDTH=64
    )
    finite = torch.where(x.isfinite() & (seen != 0)[:, None, :, None], x, 0.0).float()
    right = torch.stack([each.sum(2) for each in finite.split(PART * PARTS, 2)], 2)
    torch.testing.assert_close(sums, right, rtol=1e-4, atol=1e-4)


def test_the_mean_has_its_rotation_beside_it() -> None:
    sums = torch.randn(B, H, 5, 64, device=DEVICE)
    sums[1, 1, 2, 7] = torch.inf
    mean = torch.full((B, H, 2, 64), torch.nan, device=DEVICE)
    mean_fp8.mean_fp8[B * H,](sums, mean, S, 5, AT_ONCE=4, HEAD_DIM=64, WIDTH=64, ROTATED=True)
    right = sums.sum(2) / S
    right[1, 1, 7] = 0.0
    torch.testing.assert_close(mean[:, :, 0], right)
    torch.testing.assert_close(mean[:, :, 1], rounding.rotated(right))
