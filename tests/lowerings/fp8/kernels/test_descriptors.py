from __future__ import annotations

from tests.lowerings.fp8.kernels.descriptors import from_nowhere, unset

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
