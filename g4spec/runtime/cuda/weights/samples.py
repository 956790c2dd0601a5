"""Types whose kernels tests compile by themselves (`Unit.names`), and the others (`Unit.more`)."""

from g4spec.runtime.cuda.weights import held_size, packing

SAMPLES = ("iq4_xs", "q2_k", "q3_k")
"""Of the types whose codes are numbers of a table's entries, a code of each number of bits."""

ALIKE = tuple(n for n in ("iq4_nl", "mxfp4", "nvfp4", *held_size.BLOCKS) if n not in SAMPLES)
"""The others: instances of the same templates with another table."""

COMPILED = tuple(n for n in packing.PARTS if n not in (*SAMPLES, *ALIKE))
"""Types of other kinds, whose kernels are all compiled."""
