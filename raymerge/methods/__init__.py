"""Merge methods: declarations and arithmetic on float32 tensors. No files, names, logs or clocks."""

from raymerge.methods.draws import normal, uniform
from raymerge.methods.gather import StoredTile, gather, sample_of, sample_runs, sampled
from raymerge.methods.method import (
    BLOCK,
    ROW_GROUP,
    SAMPLE_LENGTH,
    SAMPLE_RUNS,
    Access,
    BaseUse,
    Kernel,
    Method,
    Parameter,
    Settings,
    Takes,
    Tile,
    Value,
)
from raymerge.methods.random import keep_mask, random_key
from raymerge.methods.stored import AnchoredKernel, AnchoredSum, Stored, StoredKernel
from raymerge.methods.table import find_method, is_parameter, methods

__all__ = [
    "BLOCK",
    "ROW_GROUP",
    "SAMPLE_LENGTH",
    "SAMPLE_RUNS",
    "Access",
    "AnchoredKernel",
    "AnchoredSum",
    "BaseUse",
    "Kernel",
    "Method",
    "Parameter",
    "Settings",
    "Stored",
    "StoredKernel",
    "StoredTile",
    "Takes",
    "Tile",
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
