"""Router rows from the embedding of the prompts' tokens alone, equal in all layers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import torch

from raymerge.architectures import logical_name
from raymerge.errors import Problem
from raymerge.planner.inputs.sources import Source
from raymerge.planner.inputs.stages import GateSpec
from raymerge.planner.inputs.weights import Weights
from raymerge.stages.router.gates_part import Rows, unit
from raymerge.stages.router.prompts import TokenRun

_ROWS_AT_ONCE = 1024
_OTHER_MODE = "Use gate_mode: hidden_avg, or random."


def embed_rows(spec: GateSpec, runs: Sequence[TokenRun]) -> Rows:
    """The rows of every layer.

    The embeddings of all tokens of an expert's texts are added and made a vector of length 1, those of its
    negative prompts likewise; a row is the difference of the two, of length 1 again. Of the embedding
    only rows that are needed are read.

    Raises:
        CheckpointError: the embedding cannot be read.
    """
    counts = _counts(runs)
    ids = sorted({token for counted in counts.values() for token in counted})
    num_experts = len(spec.experts) + len(spec.shared)
    sums = torch.zeros(2, num_experts, spec.hidden_size, dtype=torch.float64)
    name = str(embedding_of(spec.base))
    with Weights(spec.base) as weights:
        for begin in range(0, len(ids), _ROWS_AT_ONCE):
            some = ids[begin : begin + _ROWS_AT_ONCE]
            rows = weights.rows(name, some).double()
            for (expert, sign), counted in counts.items():
                often = torch.tensor([counted[token] for token in some], dtype=torch.float64)
                sums[0 if sign > 0 else 1, expert] += often @ rows
    positive, negative = unit(sums)
    both = unit(positive - negative)
    routed = len(spec.experts)
    return Rows((both[:routed] * spec.scale).float(), both[routed:].float())


def embed_nbytes(spec: GateSpec, runs: Sequence[TokenRun]) -> int:
    """Stored bytes of the rows of the embedding that are read."""
    with Weights(spec.base) as weights:
        name = str(embedding_of(spec.base))
        one = weights.nbytes(name) // weights.shape(name)[0]
    return one * len({token for run in runs if run.sign for token in run.tokens})


def embedding_of(base: Source) -> str | None:
    """Logical name of the base's token embedding, or None where it has none that is known as such."""
    return None if base.pair is None else logical_name(base.pair.embedding, base.rules)


def embedding_problems(spec: GateSpec) -> Iterator[Problem]:
    """Reasons why rows cannot be made of the base's embedding."""
    name = embedding_of(spec.base)
    if name is None:
        yield Problem(spec.base.name, "has no token embedding that is known as such.", _OTHER_MODE)
        return
    with Weights(spec.base) as weights:
        shape = weights.shape(name)
    if shape[1:] != (spec.hidden_size,):
        what = (
            f"its embedding {name} is {list(shape)}, and the router's rows have {spec.hidden_size} elements."
        )
        yield Problem(spec.base.name, what, _OTHER_MODE)


def _counts(runs: Sequence[TokenRun]) -> dict[tuple[int, int], Counter[int]]:
    """How often each token stands in the texts for and against each expert."""
    found: dict[tuple[int, int], Counter[int]] = {}
    for run in runs:
        if run.sign:
            found.setdefault((run.expert, run.sign), Counter()).update(run.tokens)
    return found
