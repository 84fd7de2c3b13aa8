"""Names and roles: what the tensors of a checkpoint are, from their names and the config alone."""

from raymerge.architectures.canonical import (
    FusedLayout,
    canonical_block,
    fused_layout,
    logical_name,
    logical_names,
)
from raymerge.architectures.depth import restack_config
from raymerge.architectures.layers import Stack, rename_layer, stacks
from raymerge.architectures.modules import module_of
from raymerge.architectures.roles import TensorInfo, describe
from raymerge.architectures.rules import LayoutKind, Projection, Role, Rules, load_rules
from raymerge.architectures.ties import TiedPair, declared_tie, tied_pair

__all__ = [
    "FusedLayout",
    "LayoutKind",
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
    "load_rules",
    "logical_name",
    "logical_names",
    "module_of",
    "rename_layer",
    "restack_config",
    "stacks",
    "tied_pair",
]
