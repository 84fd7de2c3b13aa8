"""Scales of what a model computes, measured on data when it was quantised: of the inputs and outputs of its
matrices, and of the keys and values that it caches. Weights tell nothing of them.
"""

from __future__ import annotations

INPUT_SCALES = (".input_scale", ".activation_scale", ".act_scale", ".input_global_scale")
"""Endings of the scales of a matrix's inputs."""
CACHE_SCALES = (
    *(".k_scale", ".v_scale", ".q_scale", ".kv_scale", ".qkv_scale", ".prob_scale", ".prob_output_scale"),
    *(".k_global_scale", ".v_global_scale", ".q_global_scale"),
    *(".q_proj.output_scale", ".k_proj.output_scale", ".v_proj.output_scale", ".qkv_proj.output_scale"),
)
"""Endings of the scales of queries, cached keys and values, and attention probabilities."""

_OTHERS = (".output_scale", ".output_global_scale", "_proj_input_scale", "_proj_output_scale")
# Of outputs, and of stacks of experts, whose names do not end with ".weight". Not "_output_scale" alone:
# Gemma 3n has a weight "altup.correct_output_scale".
_ALL = (*INPUT_SCALES, *CACHE_SCALES, *_OTHERS)
_DIVISOR = "_global_scale"


def is_activation_scale(name: str) -> bool:
    """Whether a tensor of a quantised model is such a scale by its name; others may use the words."""
    return name.endswith(_ALL)


def is_divisor(name: str) -> bool:
    """Whether numbers are divided by a scale, so that the smallest is for the largest inputs."""
    return name.endswith(_DIVISOR)
