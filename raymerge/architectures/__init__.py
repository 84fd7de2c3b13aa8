"""Names and roles: what the tensors of a checkpoint are, from their names and the config alone."""

from raymerge.architectures.depth import restack_config
from raymerge.architectures.layers import Stack, rename_layer, stacks
from raymerge.architectures.roles import (
    CanonicalNames,
    FusedLayout,
    NameReader,
    TensorInfo,
    TiedPair,
    canonical_block,
    declared_tie,
    describe,
    fused_layout,
    joined_matrix,
    logical_name,
    logical_names,
    module_finder,
    module_of,
    other_names,
    tied_pair,
)
from raymerge.architectures.rules import LayoutKind, Projection, Role, Rules, load_rules

__all__ = [
    "CanonicalNames",
    "FusedLayout",
    "LayoutKind",
    "NameReader",
    "Projection",
    "Role",
    "Rules",
    "Stack",
    "TensorInfo",
    "TiedPair",
    "canonical_block",
    "declared_tie",
    "describe",
    "fused_layout",
    "joined_matrix",
    "load_rules",
    "logical_name",
    "logical_names",
    "module_finder",
    "module_of",
    "other_names",
    "rename_layer",
    "restack_config",
    "stacks",
    "tied_pair",
]
