"""Constants that Python and the kernels share, each stated once, here.

Kernels include them as the header `g4spec_constants.cuh`, which `header` generates in memory: every
number becomes an enumerator, every `IntEnum` a struct with the same members. A name is the same on
both sides, so a search finds all users.
"""

from __future__ import annotations

import functools
from enum import IntEnum

from g4spec import core

HEADER = "g4spec_constants.cuh"
"""Name by which kernels include the generated header."""

# ---- steps and the KV cache

PAGE = core.PAGE
"""Positions of a page of the KV cache."""
MAX_STEP_ROWS = core.MAX_STEP_ROWS
"""Maximum rows of a sequence in a step."""
CACHE_ROTARY_PAIRS = 64
"""Rotary pairs of a head that the cache stores of keys in layers whose keys are their values before
norm and rotation: columns 0 .. 63 of both halves."""

# ---- packed weights and packed activations

PACK_ROWS = 128
"""Weight rows that are packed together."""
INTERLEAVE_ROWS = 16
"""Rows of the gate projection that alternate with as many rows of the up projection."""
GROUP_ROWS = MAX_STEP_ROWS
"""Activation rows of a group: two tiles of 8."""
ACT_COLUMNS = 64
"""Columns of a block of packed activations."""
SPLIT16, SUMS32, SPLIT32, ACT_BYTES = 1024, 1152, 1216, 1280
"""Bytes of a block of 8 rows, at which begin: sums of 16 columns as two halves each, sums of 32
columns as floats, sums of 32 columns as two halves each; and the size of the block."""
TILE_BYTES = 1024
"""Bytes of the halves of 8 rows in a block."""
BYTE_SCALES = 8 * 256
"""Activations as int8: byte of a unit of 256 columns of 8 rows at which the scales of the rows
begin."""
BYTE_ROWS = BYTE_SCALES + 8 * 4
"""Bytes of such a unit, with a float32 scale per row."""
GATED_SCALE = 64
"""Row scale of products of an activation, which may exceed half precision: the stored half is the
value divided by this."""

# ---- GEMMs and experts of a step

GEMM_CONSUMERS = 8
"""Warps of a CTA that multiply; one more warp copies."""
GEMM_THREADS = 32 * (GEMM_CONSUMERS + 1)
"""Threads of a CTA for at most 16 activation rows."""
GEMM_PRODUCER_WARPS = 4
"""Warps that copy in a CTA for more rows where registers can be redistributed (sm_90a)."""
Q4_K_SCRATCH, Q6_K_SCRATCH, Q6_K_UPPER_SCRATCH = 1664, 1152, 2048
"""Bytes of shared memory that a warp needs for the scales of a unit; Q4_K's are also Q5_K's."""
MOE_TEAM_WARPS = 4
"""Warps of a team, which multiplies 128 weight rows."""
MOE_COPY_WARPS = 3
"""Warps of a CTA that copy: one weights, two activations."""
MOE_MAX_ROWS = 128
"""Maximum rows for which a launch computes a layer with experts."""
MOE_COUNTERS = 1 + MOE_MAX_ROWS // 8 + MOE_MAX_ROWS // 4 + 1
"""Counters before those of the visits: router jobs, GEMM tiles of each tile of 8 rows, router jobs
of each group of four rows, and products taken."""

# ---- attention of a step

HEADS_PER_BLOCK = 4
"""Heads of a token that a block norms and rotates, one warp each."""
NORM_V, V_FROM_K = 1, 2
"""Flags: values are normed; values are computed from the projection of keys."""
GROWTH_SHIFT = 11
"""Log2 of the positions of the largest chunk below `GROWTH_START`, where chunks grow."""
GROWTH_START = 2 << GROWTH_SHIFT
"""Position from which on chunks double in size with every octave."""
MAX_ROW_CHUNKS = 256
"""Maximum chunks that a row sees."""
MAX_ITEMS = MAX_ROW_CHUNKS + 8
"""Maximum work items of a block: chunks of keys of one KV head and block of rows."""
ATTENTION_WORK_BYTES = 2176
"""Bytes of static shared memory that launches leave for a block's list of work items."""
MAX_ITEM_HEADS, MAX_ITEM_TILES = 256, 65535
"""Maximum KV heads, also blocks of rows, and maximum tiles of keys, that a work item can name."""
COMBINE_WARPS = 8
"""Warps of a block that combines chunks."""
PLAIN_THREADS, PLAIN_ROWS = 128, 8
"""Attention without tensor cores: threads and rows of a block."""
WINDOW_HEAD_DIM, WINDOW_GROUP, WINDOW_TOKENS = 256, 2, 4
"""Attention of a layer with a window in one kernel: head size, query heads per KV head, and tokens
of a tile of 8 rows."""
WINDOW_WARPS = 16
"""Maximum warps of a block there, and of all blocks of a multiprocessor."""
WINDOW_MAX_CHUNKS_128, WINDOW_MAX_CHUNKS_256 = 10, 6
"""Maximum chunks that a row may see there, with chunks of 128 positions and of 256."""

# ---- choice of tokens, and the state between cycles

LOGIT_THREADS, LOGIT_SPAN = 256, 4096
"""Threads of a block that reads logits, and columns that it reads."""
TOP_THREADS, TOP_KEYS = 512, 16
"""Threads of a block that chooses among the candidates of a row, and keys of a thread."""
SCREEN_KEYS = 4
"""Keys of a thread in the kernel that picks the candidates of `screen`."""
SAMPLER_BYTES = 32
"""Size of a sequence's sampler in device memory."""
RESULT_IDS = 7
"""Words of a cycle's result before its token ids; a word is an int64."""
RESULT_CHOSEN = RESULT_IDS + MAX_STEP_ROWS
"""Word at which the chosen tokens begin."""
RESULT_LOGITS = RESULT_CHOSEN + MAX_STEP_ROWS
"""Word at which the logits begin, two float32 in each."""
RESULT_WORDS = RESULT_LOGITS + MAX_STEP_ROWS // 2 + 1
"""Words of a cycle's result for a sequence, one of them unused."""


class CycleField(IntEnum):
    """Fields of a sequence's state between cycles."""

    POSITION = 0
    """Position of row 0 of the next step."""
    ANCHOR = 1
    """Token of that row."""
    ACCEPTED = 2
    """Drafted tokens accepted in the last cycle."""
    ROWS = 3
    """Valid rows of the step, anchor included; 0: padding sequence."""
    SLOT = 4
    """Slot of the caches."""
    TURN = 5
    """Entry of the host's ring buffer that the next cycle writes."""


class SampleMode(IntEnum):
    """How a sequence's tokens are chosen: the kernels of choose.cu."""

    GREEDY = 0
    SAMPLED = 1
    TOP = 2


class RowFault(IntEnum):
    """Why no token is chosen from a row of logits."""

    NONE = 0
    """One is chosen."""
    NOT_FINITE = 1
    """There is NaN or inf, or nothing but -inf."""
    SUPPRESSED = 2
    """Only suppressed tokens may have a finite logit."""


# ---- kernels between GEMMs


class NormInput(IntEnum):
    """Input of norm.cu: x; x + h; x + norm(h)."""

    PLAIN = 0
    ADD = 1
    NORM = 2


class NormOutput(IntEnum):
    """Output of norm.cu besides the residual: nothing; normed rows as float32; normed rows as
    packed activations; packed activations divided by a power of two per row, without norm."""

    NOTHING = 0
    FLOATS = 1
    ROWS = 2
    SCALED = 3


class Activation(IntEnum):
    """Activation functions of elementwise.cu."""

    GELU = 0
    SILU = 1


# ---- portable kernels, weights

PORTABLE_WARPS = 4
"""Warps of a block of a matmul in float32."""
DEQUANT_THREADS = 256
"""Threads of a block that dequantizes weights."""

# ---- prefill

KV_TILE = 64
"""Rows of a tile of keys and values."""
FLASH_THREADS = 384
"""Threads of a block of the sm_90a kernels: two consumer warp groups and a producer."""
FLASH_ROWS, FLASH_SHARED = 128, 6 * KV_TILE * 256 * 2 + 256
"""Heads of 256: rows of a block; its shared memory in bytes for queries, two tiles of keys and of
values, and barriers."""
FLASH_WIDE_ROWS, FLASH_WIDE_SHARED = 64, KV_TILE * 512 * 2 + 2 * KV_TILE * 640 * 2 + 2048
"""Heads of 512: rows of a block; its shared memory in bytes for queries, two tiles, a few numbers
per row, and barriers."""
PREFILL_HEAD_WARPS = 8
"""Heads that a block norms and rotates at once, one warp each."""
SOFTMAX_WARPS = 4
"""Warps of a block that computes the softmax of a row; a thread holds multiples of 4 keys."""
GATED_THREADS = 256
"""Threads of a block that computes gated activations."""
GATED_CHANNELS = 8
"""Channels of a thread there."""
ROUTE_WARPS = 4
"""Rows that a block routes to experts, one warp each."""
ORDER_THREADS = 1024
"""Threads of a block that sorts visits by expert."""
GATHER_THREADS = 128
"""Threads of a block that copies a row."""


@functools.cache
def header() -> str:
    """Return the text of the header: every constant and enum of this module.

    Constants are enumerators, because NVRTC would store a `constexpr` variable in every cubin.
    """
    numbers, enums = [], []
    for name, value in globals().items():
        if name.isupper() and isinstance(value, int):
            numbers.append(f"  {name} = {value},")
        elif isinstance(value, type) and issubclass(value, IntEnum) and value is not IntEnum:
            members = ", ".join(f"{member.name} = {member.value}" for member in value)
            enums.append(f"struct {name} {{ enum Value : int {{ {members} }}; }};")
    first = "// Generated from g4spec/runtime/cuda/build/constants.py."
    return "\n".join([first, "#pragma once", "enum : int {", *numbers, "};", *enums]) + "\n"
