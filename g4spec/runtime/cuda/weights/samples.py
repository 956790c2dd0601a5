"""Types whose kernels tests compile in full (`Unit.names`), and the others (`Unit.more`)."""

from g4spec.runtime.cuda.weights import held_size, packing

SAMPLES = ("iq4_xs", "q2_k", "q3_k")
"""Three of the types whose codes are table indices, one for each number of bits."""

ALIKE = tuple(n for n in ("iq4_nl", "mxfp4", "tq2_0", *held_size.BLOCKS) if n not in SAMPLES)
"""The other such types: instances of the same templates with another table."""

COMPILED = tuple(n for n in packing.PARTS if n not in (*SAMPLES, *ALIKE))
"""All other types; all of their kernels are compiled."""
