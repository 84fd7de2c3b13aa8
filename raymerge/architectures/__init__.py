"""Names and roles: what the tensors of a checkpoint are, from their names and the config alone."""

from raymerge.architectures.canonical import (
    CanonicalNames,
    FusedLayout,
    canonical_block,
    fused_layout,
    logical_name,
    logical_names,
    other_names,
)
from raymerge.architectures.dense_models import DenseModel, dense_mlp, dense_model
from raymerge.architectures.depth import restack_config
from raymerge.architectures.layers import Stack, rename_layer, stacks
from raymerge.architectures.moe_output import (
    AddedTensor,
    FusedExperts,
    added_tensors,
    expert_names,
    fused_names,
    is_fused,
    moe_config,
    router_name,
    shared_gate_name,
    shared_names,
    trunk_name,
)
from raymerge.architectures.moe_refusals import Mixture, Refusal, refusals
from raymerge.architectures.moe_targets import Layout, MoeTarget, named_targets, targets
from raymerge.architectures.roles import (
    NameReader,
    TensorInfo,
    describe,
    joined_matrix,
    module_finder,
    module_of,
)
from raymerge.architectures.rules import LayoutKind, Projection, Role, Rules, load_rules
from raymerge.architectures.ties import TiedPair, declared_tie, tied_pair

__all__ = [
    "AddedTensor",
    "CanonicalNames",
    "DenseModel",
    "FusedExperts",
    "FusedLayout",
    "Layout",
    "LayoutKind",
    "Mixture",
    "MoeTarget",
    "NameReader",
    "Projection",
    "Refusal",
    "Role",
    "Rules",
    "Stack",
    "TensorInfo",
    "TiedPair",
    "added_tensors",
    "canonical_block",
    "declared_tie",
    "dense_mlp",
    "dense_model",
    "describe",
    "expert_names",
    "fused_layout",
    "fused_names",
    "is_fused",
    "joined_matrix",
    "load_rules",
    "logical_name",
    "logical_names",
    "module_finder",
    "module_of",
    "moe_config",
    "named_targets",
    "other_names",
    "refusals",
    "rename_layer",
    "restack_config",
    "router_name",
    "shared_gate_name",
    "shared_names",
    "stacks",
    "targets",
    "tied_pair",
    "trunk_name",
]
