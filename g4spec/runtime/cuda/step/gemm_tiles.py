"""Tile sizes of GEMMs with packed quantized matrices (`linear`, `linear_wide`), and the shared
memory that they take.

K is counted in units: a unit is the columns of a pipeline stage.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from g4spec.runtime.cuda.build import nvrtc
from g4spec.runtime.cuda.build.constants import (
    ACT_BYTES,
    ACT_COLUMNS,
    BYTE_ROWS,
    GEMM_CONSUMERS,
    PACK_ROWS,
    Q4_K_SCRATCH,
    Q6_K_SCRATCH,
    Q6_K_UPPER_SCRATCH,
    TILE_BYTES,
)
from g4spec.runtime.cuda.weights import packing

SCRATCH = dict.fromkeys(("q4_k", "q5_k", "iq3_s"), Q4_K_SCRATCH) | {"q6_k": Q6_K_SCRATCH}
"""Maximum bytes of shared memory that a warp uses for the scales of a unit."""

CODEBOOKS = dict.fromkeys(
    ("iq4_nl", "iq4_xs", "mxfp4", "iq3_xxs", "iq2_xxs", "iq1_s", "tq1_0", "tq2_0"), 32
)
CODEBOOKS |= dict.fromkeys(("nvfp4", "q3_k", "q2_k", "iq2_s", "iq2_xs", "iq1_m"), 16)
"""Types whose codes are indices into a table (gemm_codebook.cuh) -> values that share a scale."""

PAIRED = ("iq4_nl", "iq4_xs", "mxfp4", "nvfp4", "iq3_xxs")
PAIR_TABLE = 256 * 128
"""Types whose kernels on sm_90a look up pairs of codes in shared memory, and bytes of the table."""

SCALED_CODEBOOKS = ("q3_k", "iq2_xxs", "iq2_xs", "iq2_s", "iq1_s", "iq1_m")
"""Those whose codes are multiplied by their scales before the product (gemm_scaled.cuh)."""

SUMS = dict.fromkeys((*CODEBOOKS, "q6_k"), 0) | {"q2_k": 128}
"""Bytes of the sums of 8 activation rows of a 64-column block that warp groups need (64 for types
not listed)."""

WIDE = {"q4_k", "q5_k", "iq3_s", *CODEBOOKS} - {"iq4_nl", "mxfp4", "nvfp4"}
"""Types whose stages hold 256 weight rows if shared memory allows."""

MAX_STAGES = {128: 8, 256: 5}
"""Weight rows of a stage -> maximum number of stages in shared memory."""
MANY_GROUPS = 1024
"""Number of 128-row groups from which stages of Q6_K hold 256 rows."""


@dataclass(frozen=True, slots=True)
class GemmConfig:
    """Tile sizes of one kernel instance.

    Attributes:
        type, unit: quant type, and columns per unit.
        tiles: tiles of 8 activation rows.
        rows: weight rows of a stage.
        stages: stages in shared memory.
        upper: read only the upper two bits of the codes; activations are bytes.
        groups: groups of 16 activation rows per read of the weights (linear_wide.cu).
        wgmma: multiply all groups with `wgmma` (sm_90a), not `mma.sync`.
        pairs: look up pairs of codes in shared memory, only with one group.
    """

    type: str
    unit: int
    tiles: int
    rows: int
    stages: int
    upper: bool = False
    groups: int = 1
    wgmma: bool = False
    pairs: bool = False

    @property
    def format(self) -> str:
        """Name of the weight format in the kernels."""
        name, spelt = packing.format_name(self.type, self.unit), packing.spelt(self.type)
        return name.replace(spelt, spelt + "Pairs" * self.pairs) + "Upper" * self.upper

    def name(self, kind: str) -> str:
        if self.groups > 1:
            numbers = (self.groups, self.rows, self.stages, int(self.wgmma))
            return f"{kind}_wide<{self.format}, {', '.join(map(str, numbers))}>"
        return f"{kind}<{self.format}, {self.tiles}, {self.rows}, {self.stages}>"

    @property
    def shared(self) -> int:
        """Bytes of dynamic shared memory."""
        stage = max(self.stage, self.rows * 8 * self.tiles * 4)
        teams = GEMM_CONSUMERS * 32 // self.rows
        other = (1024 if teams > 1 else 512) * self.tiles
        scratch = max(scratch_of(self.type, self.unit, self.upper), other)
        sums, table = GEMM_CONSUMERS * 8 * self.tiles * 4, PAIR_TABLE * self.pairs
        return self.stages * (stage + 16 * teams) + GEMM_CONSUMERS * scratch + sums + table

    @property
    def stage(self) -> int:
        """Bytes of a stage: weights and activations of a unit."""
        rows = BYTE_ROWS if self.upper else self.unit // ACT_COLUMNS * ACT_BYTES
        if self.groups > 1:
            rows = self.unit // ACT_COLUMNS * (TILE_BYTES + SUMS.get(self.type, 64))
        align = 1024 if self.groups > 1 else 128
        return -(-(self.weights + rows * self.tiles * self.groups) // align) * align

    @property
    def weights(self) -> int:
        """Bytes read from a unit's weights."""
        lower = packing.PARTS[self.type][1][0].nbytes(self.unit) if self.upper else 0
        return (packing.unit_bytes(self.type, self.unit) - lower) * (self.rows // PACK_ROWS)


def scratch_of(type: str, unit: int, upper: bool = False) -> int:
    """Return the bytes of shared memory that a warp uses for the scales of a unit; `upper`: of the
    kernel that reads only the upper two bits of the codes."""
    if upper:
        return Q6_K_UPPER_SCRATCH
    if type in SCALED_CODEBOOKS:
        return 64 * (unit // CODEBOOKS[type]) + 128
    if type in CODEBOOKS:
        return 128 * (unit // CODEBOOKS[type] + (type == "q2_k"))
    return SCRATCH.get(type, 0)


@functools.cache
def gemm_config(
    type: str,
    unit: int,
    groups: int,
    tiles: int,
    arch: str,
    narrow: bool = False,
    upper: bool = False,
) -> GemmConfig:
    """Return the tile sizes for a matrix of `groups` groups of 128 rows.

    `narrow` forces stages of 128 rows. The rows of a stage decide the order of sums, so they must
    not depend on the number of activation rows.
    """
    wide = (
        groups % 2 == 0
        and not narrow
        and (type in WIDE or (type == "q6_k" and groups >= MANY_GROUPS))
    )
    room = nvrtc.SHARED_LIMIT[arch]
    least = 3 if type in CODEBOOKS else 2
    rows = 256 if wide and GemmConfig(type, unit, 2, 256, least).shared <= room else 128
    # A fourth stage of 256 rows gained 0.6 % with one tile and lost 1.5 % with two.
    few = rows == 256 and tiles == 2 and not upper
    pairs = arch == "sm_90a" and type in PAIRED
    for stages in range(3 if few else MAX_STAGES[rows], 0, -1):
        config = GemmConfig(type, unit, tiles, rows, stages, upper, pairs=pairs)
        if config.shared <= room:
            return config
    raise AssertionError(f"{type} does not fit into the shared memory of {arch}")
