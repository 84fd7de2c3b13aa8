"""A donor's vocabulary on the body of a base: what has to be made before the merge, from headers and
tokenizers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from raymerge.architectures.roles import logical_name
from raymerge.checkpoints.header import StoredTensor, TensorSpec
from raymerge.checkpoints.tokenizer import TokenizerFiles
from raymerge.dtypes import DType
from raymerge.errors import PlanError, Problem
from raymerge.planner.inputs.sources import (
    EMBEDDING_ROWS,
    HEAD_ROWS,
    RowMatrix,
    Source,
    Stage,
    TransplantSpec,
    make_stage,
    model_references,
)
from raymerge.planner.outputs.embeddings_and_heads import stores_own_head
from raymerge.planner.tokenizer.matching import TokenMatch, match_tokens, pieces_of, token_forms
from raymerge.planner.tokenizer.tokens import ABSENT, Ids
from raymerge.planner.tokenizer.vocabulary import read_tokenizer_of
from raymerge.recipes.schema import Recipe, Tokenizer

_PLAIN = (
    "Store it in plain numbers first ('raymerge convert MODEL --to embedding:bf16 --to head:bf16 --to same "
    "-o OUT') and name OUT."
)


def transplant_stages(recipe: Recipe, sources: Sequence[Source], *, version: str) -> tuple[Stage, ...]:
    """The stage that makes rows for tokens that the base lacks; none where it has all of them.

    Raises:
        PlanError: the vocabulary cannot be transplanted; with all problems."""
    block = recipe.tokenizer
    assert block is not None
    pair = _pair(recipe, block, sources)
    match = pair.match
    if not len(match.missing):
        return ()
    spec = pair.spec(block)
    if problems := list(_problems(recipe, spec)):
        raise PlanError(problems)
    stage = make_stage(
        name=f"@rows-{recipe.name}" if recipe.name is not None else "@rows",
        title=f"rows for {len(match.missing)} tokens of {pair.donor.name} ({block.approximation})",
        place=recipe.where("tokenizer"),
        spec=spec,
        tensors=[
            TensorSpec(each.name, DType.F32, (len(spec.targets), each.base_shape[1]))
            for each in spec.matrices
        ],
        version=version,
    )
    return (stage,)


@dataclass(frozen=True, slots=True)
class _Pair:
    """A base and a donor with their tokenizers and rows."""

    base: Source
    donor: Source
    base_files: TokenizerFiles
    donor_files: TokenizerFiles
    match: TokenMatch

    def spec(self, block: Tokenizer) -> TransplantSpec:
        matrices = tuple(_matrices(self.base, self.donor, reads_donor=block.approximation == "omp"))
        base_rows = matrices[0].base_shape[0]
        donor_rows = min(each.donor_shape[0] for each in matrices)
        missing, shared = self.match.missing, self.match.shared
        shared = shared[shared < donor_rows]
        return TransplantSpec(
            base=self.base,
            donor=self.donor,
            approximation=str(block.approximation),
            k=block.num_atoms,
            matrices=matrices,
            shared=np.stack([shared, self.match.rows[shared]]),
            targets=np.where(missing < donor_rows, missing, ABSENT),
            pieces=self._pieces(base_rows) if block.approximation == "subword" else (),
            known=_known(self.base_files, base_rows),
        )

    def _pieces(self, base_rows: int) -> tuple[tuple[int, ...], ...]:
        forms = {number: form for form, number in token_forms(self.donor_files)}
        missing = [forms[number] for number in self.match.missing.tolist()]
        return tuple(pieces_of(self.base_files, missing, num_rows=base_rows))


def _pair(recipe: Recipe, block: Tokenizer, sources: Sequence[Source]) -> _Pair:
    merged = dict.fromkeys(reference for _, reference in model_references(recipe))
    base = next(source for source in sources if source.reference in merged)
    donor = next(source for source in sources if source.reference == block.source)
    read_rows = (base, donor) if block.approximation == "omp" else (base,)
    problems = [
        *_of_recipe(recipe, base, donor, num_models=len(merged)),
        *_of_adapters((base, donor)),
        *_of_rows(read_rows),
    ]
    read = []
    for source in (base, donor):
        files = read_tokenizer_of(source)
        if files is None:
            remedy = "Copy the tokenizer's files from the place the model comes from."
            problems.append(Problem(source.name, "it has no tokenizer files.", remedy))
        else:
            read.append(files)
    if problems:
        raise PlanError(problems)
    base_files, donor_files = read
    base_rows = stored_embedding(base).shape[0]
    return _Pair(
        base, donor, base_files, donor_files, match_tokens(base_files, donor_files, base_rows=base_rows)
    )


def stored_embedding(source: Source) -> StoredTensor:
    assert source.pair is not None
    return source.checkpoint.tensors[source.pair.embedding]


def _of_recipe(recipe: Recipe, base: Source, donor: Source, *, num_models: int) -> Iterator[Problem]:
    place = recipe.where("tokenizer", "approximation")
    if num_models > 1:
        what = f"rows are made for one model, and this recipe merges {num_models}."
        remedy = "Merge first, in a recipe with a 'name', and give this one that name as its only model."
        yield Problem(place, what, remedy)
    elif base is donor:
        what = f"{base.name} is the model and the donor too."
        yield Problem(recipe.where("tokenizer", "source"), what, "Name the model whose vocabulary is wanted.")


def _of_adapters(models: Sequence[Source]) -> Iterator[Problem]:
    """Also of a donor of which only the tokenizer is read: an adapter can bring another one."""
    for source in models:
        if source.adapter is not None:
            what = "it is laid over a model, and rows and tokenizers are taken from stored ones."
            yield Problem(source.adapter.name, what, "Merge the adapter into its model first.")


def _of_rows(read_rows: Sequence[Source]) -> Iterator[Problem]:
    for source in read_rows:
        if source.pair is None or source.pair.embedding not in source.checkpoint.tensors:
            what = "it has no token embedding in plain numbers that is known as such."
            yield Problem(source.name, what, f"Name a model that has one. If it is quantised: {_PLAIN}")


def _matrices(base: Source, donor: Source, *, reads_donor: bool) -> Iterator[RowMatrix]:
    """The embedding, and the head where the base has one of its own. A tied donor gives its embedding for
    both."""
    assert base.pair is not None
    other = donor.pair.embedding if donor.pair is not None else ""
    theirs = donor.pair.head if donor.pair is not None and stores_own_head(donor) else other
    pairs = [(EMBEDDING_ROWS, base.pair.embedding, other)]
    if stores_own_head(base):
        pairs.append((HEAD_ROWS, base.pair.head, theirs))
    for name, own, of_donor in pairs:
        yield RowMatrix(
            name,
            logical_name(own, base.rules),
            logical_name(of_donor, donor.rules) if reads_donor else "",
            _shape(base, own),
            _shape(donor, of_donor),
        )


def _shape(source: Source, name: str) -> tuple[int, int]:
    """(0, 0) where there is no such matrix."""
    tensor = source.checkpoint.tensors.get(name)
    return (0, 0) if tensor is None or len(tensor.shape) != 2 else (tensor.shape[0], tensor.shape[1])


def _known(files: TokenizerFiles, num_rows: int) -> Ids:
    return np.array(sorted({row for row in files.tokens.values() if row < num_rows}), dtype=np.int64)


def _problems(recipe: Recipe, spec: TransplantSpec) -> Iterator[Problem]:
    yield from _quantised(spec.base, spec)
    lengths = [each.base_shape[0] for each in spec.matrices]
    if len(set(lengths)) > 1:
        what = (
            f"its embedding has {lengths[0]} rows and its head {lengths[1]}, so that tokens lack one of them."
        )
        yield Problem(spec.base.name, what, "Use a checkpoint in which both have a row for each token.")
    if spec.approximation != "omp":
        return
    yield from _quantised(spec.donor, spec)
    num_shared, base, donor = spec.shared.shape[1], spec.base.name, spec.donor.name
    if not num_shared:
        what = f"{base} and {donor} have no token in common, from which rows could be made."
        remedy = "Check that these are the tokenizers that you mean, or take 'mean', which needs none."
        yield Problem(recipe.where("tokenizer", "approximation"), what, remedy)
    elif num_shared < spec.k:
        what = f"a row is to be made of {spec.k} shared tokens, and {base} and {donor} share {num_shared}."
        yield Problem(recipe.where("tokenizer", "k"), what, f"Take {num_shared} or less.")


def _quantised(source: Source, spec: TransplantSpec) -> Iterator[Problem]:
    pair = source.pair
    assert pair is not None
    names = [pair.embedding, *([pair.head] if len(spec.matrices) > 1 and stores_own_head(source) else [])]
    for name in names:
        tensor = source.checkpoint.tensors[name]
        if not tensor.dtype.is_mergeable or len(tensor.shape) != 2:
            what = f"{name} is stored as {tensor.dtype.value} codes, and rows are made from plain numbers."
            yield Problem(source.name, what, _PLAIN)
