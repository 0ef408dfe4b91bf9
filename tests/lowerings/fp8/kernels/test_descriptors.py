from __future__ import annotations

from tests.lowerings.fp8.kernels.descriptors import unset

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
