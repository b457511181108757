"""The hot path of machine code, from texts as nvdisasm prints them."""

import pytest

from benchmarks.support.machine_code import blocks_of, hot_path

BRANCHES = """
.text.kernel:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/                   LDG.E.128 R4, desc[UR4][R2.64] ;
        /*0020*/              @!P0 BRA `(.L_x_0) ;
        /*0030*/                   FMUL R4, R4, R5 ;
        /*0040*/                   CALL.REL.NOINC `($kernel$slow) ;
        /*0050*/                   IADD3 R4, R4, R5, RZ ;
.L_x_0:
        /*0060*/               @P1 STG.E.64 desc[UR4][R2.64], R4 ;
        /*0070*/               @P2 EXIT ;
        /*0080*/                   STG.E.U8 desc[UR4][R2.64], R4 ;
        /*0090*/                   EXIT ;
.L_x_1:
        /*00a0*/                   BRA `(.L_x_1);
        /*00b0*/                   NOP;
"""
LOOP = """
        /*0000*/                   MOV R1, R2 ;
.L_x_0:
        /*0010*/                   LDG.E.128 R4, desc[UR4][R2.64] ;
        /*0020*/                   FADD R4, R4, R5 ;
        /*0030*/                   BRA.U UP0, `(.L_x_0) ;
        /*0040*/                   STG.E desc[UR4][R2.64], R4 ;
        /*0050*/                   EXIT ;
"""
TWO_WAYS = """
        /*0000*/               @P0 BRA `(.L_x_0) ;
        /*0010*/                   LDG.E R4, desc[UR4][R2.64] ;
        /*0020*/                   LDG.E R5, desc[UR4][R2.64] ;
        /*0030*/                   BRA `(.L_x_1) ;
.L_x_0:
        /*0040*/                   LDG.E R4, desc[UR4][R2.64] ;
.L_x_1:
        /*0050*/                   EXIT ;
"""


def test_the_shorter_way_is_taken():
    path = hot_path(blocks_of(BRANCHES))
    assert path.issued == 7 and path.count("FMUL", "CALL") == 0
    assert path.bytes_of("LDG") == 16 and path.bytes_of("STG") == 9


def test_a_loop_is_taken_as_often_as_its_bytes_ask():
    path = hot_path(blocks_of(LOOP), loop_bytes=160)
    assert path.count("LDG") == path.count("FADD") == path.count("BRA") == 10 and path.issued == 33
    with pytest.raises(ValueError, match="no loop loads anything"):
        hot_path(blocks_of(BRANCHES), loop_bytes=16)


def test_a_way_that_loads_enough():
    assert hot_path(blocks_of(TWO_WAYS)).count("LDG") == 1
    assert hot_path(blocks_of(TWO_WAYS), loads=8).count("LDG") == 2
    with pytest.raises(ValueError, match="no way through the kernel loads 12 bytes"):
        hot_path(blocks_of(TWO_WAYS), loads=12)
