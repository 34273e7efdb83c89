"""How packed weights lie in memory: groups of 16 rows side by side, blocks of 32 columns one after the other.

The bytes are those of the file, only moved: a packed tensor unpacks to exactly the file's integers and scales. Within a block,
four consecutive columns of a row are neighbours (the 4 bytes that one integer instruction sums), then come the other rows.
"""

from typing import Literal

import msgspec

from potluck.engine.kernels.processor import ROWS

LAYOUT_VERSION = 2
BLOCK = 32  # columns
# Where a super-block keeps its 8 scales and 8 minimums of 6 bits: the upper two of both for blocks i and i + 4, then the lower four.
SIX_HIGH_AT, SIX_LOW_AT = 64, 128


class QuantLayout(msgspec.Struct, frozen=True):
    """Offsets are within one super-block of a group; `part` is the stride from one block of 32 columns to the next."""

    code: int
    name: str
    bits: int
    source_block: int  # columns and bytes of one block of one row in the file
    source_bytes: int
    offset: int = 0  # subtracted from the stored unsigned integer
    has_minimum: bool = False
    scales: Literal["block", "super", "super16"] = (
        "block"  # half per block; or half per super-block times 6 bits, or times int8 per 16
    )
    part: int = 0
    first_part: int = 0
    nibbles_at: int = 0  # within a part
    high_at: int = 0
    high_bits: int = 0

    @property
    def blocks_per_super(self) -> int:
        return self.source_block // BLOCK

    @property
    def super_bytes(self) -> int:
        return self.first_part + self.blocks_per_super * self.part

    def packed_bytes(self, rows: int, columns: int) -> int:
        return -(-rows // ROWS) * (columns // self.source_block) * self.super_bytes


class FloatLayout(msgspec.Struct, frozen=True):
    """Unquantised: for each column, 16 rows side by side; columns are padded with zeros to whole blocks."""

    code: int
    name: str
    element_bytes: int

    def packed_bytes(self, rows: int, columns: int) -> int:
        return -(-rows // ROWS) * -(-columns // BLOCK) * BLOCK * ROWS * self.element_bytes


Layout = QuantLayout | FloatLayout

LAYOUTS: dict[str, Layout] = {
    layout.name: layout
    for layout in (
        FloatLayout(0, "F32", 4),
        FloatLayout(1, "F16", 2),
        FloatLayout(2, "BF16", 2),
        QuantLayout(3, "Q4_0", 4, 32, 18, offset=8, part=288, nibbles_at=32),
        QuantLayout(4, "Q4_1", 4, 32, 20, has_minimum=True, part=320, nibbles_at=64),
        QuantLayout(5, "Q5_0", 5, 32, 22, offset=16, part=352, nibbles_at=32, high_at=288, high_bits=1),
        QuantLayout(6, "Q5_1", 5, 32, 24, has_minimum=True, part=384, nibbles_at=64, high_at=320, high_bits=1),
        QuantLayout(7, "Q8_0", 8, 32, 34, offset=128, part=544, nibbles_at=32),
        QuantLayout(8, "Q4_K", 4, 256, 144, has_minimum=True, scales="super", part=256, first_part=256),
        QuantLayout(
            9, "Q5_K", 5, 256, 176, has_minimum=True, scales="super", part=320, first_part=256, high_at=256, high_bits=1
        ),
        QuantLayout(
            10, "Q6_K", 6, 256, 210, offset=32, scales="super16", part=416, first_part=32, nibbles_at=32, high_at=288,
            high_bits=2,
        ),
    )
}  # fmt: skip

LAYOUT_BY_CODE = {layout.code: layout for layout in LAYOUTS.values()}
