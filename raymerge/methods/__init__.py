"""Merge methods: declarations and arithmetic on float32 tensors. No files, names, logs or clocks."""

from raymerge.methods.gather import (
    SAMPLE_LENGTH,
    SAMPLE_RUNS,
    StoredTile,
    gather,
    sample_of,
    sample_runs,
    sampled,
)
from raymerge.methods.kernel import BLOCK, ROW_GROUP, AnchoredSum, Kernel, Settings, Stored, Tile, Value
from raymerge.methods.method import Access, BaseUse, Method, Parameter, Takes
from raymerge.methods.random import keep_mask, normal, random_key, uniform
from raymerge.methods.reference import DOUBT, Block, Elements, Expected, LogicalTensor, Reference, Undecided
from raymerge.methods.table import find_method, is_parameter, methods

__all__ = [
    "BLOCK",
    "DOUBT",
    "ROW_GROUP",
    "SAMPLE_LENGTH",
    "SAMPLE_RUNS",
    "Access",
    "AnchoredSum",
    "BaseUse",
    "Block",
    "Elements",
    "Expected",
    "Kernel",
    "LogicalTensor",
    "Method",
    "Parameter",
    "Reference",
    "Settings",
    "Stored",
    "StoredTile",
    "Takes",
    "Tile",
    "Undecided",
    "Value",
    "find_method",
    "gather",
    "is_parameter",
    "keep_mask",
    "methods",
    "normal",
    "random_key",
    "sample_of",
    "sample_runs",
    "sampled",
    "uniform",
]
