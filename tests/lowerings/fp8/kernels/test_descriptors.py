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
