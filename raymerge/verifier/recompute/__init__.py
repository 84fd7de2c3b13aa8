"""What a merge should have made, recomputed from the sources by a slow path of its own, in float64.

Written from the formulas of docs/methods.md, and apart from what merges: neither tiles nor kernels nor
compiled loops nor codecs are shared with it.
"""

from raymerge.verifier.recompute.spectral import Undecided
from raymerge.verifier.recompute.table import Recomputation, recomputation_of, recomputed
from raymerge.verifier.recompute.tensor import Block, Expected, LogicalTensor

__all__ = [
    "Block",
    "Expected",
    "LogicalTensor",
    "Recomputation",
    "Undecided",
    "recomputation_of",
    "recomputed",
]
