"""Whether reads of registers that were not written are found in machine code."""

from __future__ import annotations

import pytest
from unwritten import unwritten

CODE = """
.text._forward_kernel:
        /*0000*/                   ULDC.64 UR6, c[0x0][0x210] ;
        /*0010*/              @!P0 BRA `(.L_x_1) ;
        /*0020*/                   UIADD3 UR10, UP0, UR6, 0x20, URZ ;
        /*0030*/                   HGMMA.64x16x16.F32 R96, R24, gdesc[UR8].tnspB, R96 ;
.L_x_1:
        /*0040*/                   BSSY B0, `(.L_x_2) ;
        /*0050*/                   R2UR UR12, R3 ;
        /*0060*/                   UIADD3 UR10, UP0, {read}, 0x20, URZ ;
        /*0070*/                   UMOV UR11, 0xc0000010 ;
        /*0080*/                   HGMMA.64x16x16.F32 R96, R24, gdesc[UR8].tnspB, R96 ;
.L_x_2:
        /*0090*/                   EXIT ;
"""
"""As ptxas of triton 3.6 has it of a kernel whose first loop may be left out."""


@pytest.mark.parametrize(
    ("read", "found"), [("UR10", 1), ("UR6", 0), ("UR7", 0), ("UR12", 0), ("UR40", 0)]
)
def test_what_was_written_on_one_way_alone_is_found(read: str, found: int) -> None:
    """Each way counts; the second half of a pair, what a branch does not pass, and registers that
    the code writes nowhere are no finding."""
    first = CODE.format(read=read).replace("gdesc[UR8].tnspB, R96 ;\n.L_x_1", "R5, R96 ;\n.L_x_1")
    assert len(unwritten(first)) == found


def test_a_product_reads_the_addresses_behind_its_register() -> None:
    """Of a tile in registers and one in shared memory: the upper pair, here UR10 and UR11, of which
    the first loop writes the lower one alone."""
    assert len(unwritten(CODE.format(read="UR6"))) == 1
