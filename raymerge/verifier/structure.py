"""Structure: names, shapes, dtypes, index both ways, sizes, and a config that agrees with the tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raymerge.architectures import load_rules, stacks, tied_pair
from raymerge.architectures.sections import text_section
from raymerge.checkpoints.header import StoredTensor
from raymerge.checkpoints.index import INDEX_FILE
from raymerge.checkpoints.source import Checkpoint, main_dtype, open_checkpoint
from raymerge.dtypes import DType, config_name
from raymerge.errors import Problem, UserError, VerificationError
from raymerge.planner.tables import Plan, load_plan

RECORD_PLAN = Path("raymerge") / "plan"
"""Where a merged checkpoint keeps the plan that it was made by."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What was found; ``problems`` empty means that the checkpoint is sound."""

    path: str
    """The checkpoint."""
    tensors: int
    """Tensors in it."""
    nbytes: int
    """Bytes of its weight files."""
    files: int
    """Weight files."""
    against_plan: bool
    """Whether it was compared with the plan that it was made by."""
    problems: tuple[Problem, ...]
    """What is wrong."""

    def require(self) -> Verdict:
        """This verdict, if nothing is wrong.

        Raises:
            VerificationError: with every problem.
        """
        if self.problems:
            raise VerificationError(self.problems)
        return self


def verify_structure(root: Path) -> Verdict:
    """Verify a checkpoint's structure; one that raymerge made also against its plan.

    Never raises for what is wrong with the checkpoint: the verdict says it.
    """
    try:
        checkpoint = open_checkpoint(root, str(root))
        plan = load_plan(root / RECORD_PLAN) if (root / RECORD_PLAN).is_dir() else None
    except UserError as error:
        return Verdict(str(root), 0, 0, 0, False, error.problems)
    problems = [*_index_problems(checkpoint), *_config_problems(checkpoint)]
    if plan is not None:
        problems += _plan_problems(checkpoint, plan)
    return Verdict(
        path=str(root),
        tensors=len(checkpoint.tensors),
        nbytes=sum(file.nbytes for file in checkpoint.files),
        files=len(checkpoint.files),
        against_plan=plan is not None,
        problems=tuple(problems),
    )


def _plan_problems(checkpoint: Checkpoint, plan: Plan) -> Iterator[Problem]:
    """Differences between the tensors on disk and those that the plan lists."""
    table = plan["tensors"]
    shards = plan["shards"].column("name").to_pylist()
    wanted = {
        row["name"]: (row["dtype"], tuple(row["shape"]), shards[row["shard"]], row["offset"])
        for row in table.to_pylist()
    }
    for name, tensor in checkpoint.tensors.items():
        found = (tensor.dtype.value, tensor.shape, tensor.key, tensor.offset)
        if name not in wanted:
            yield Problem(f"{checkpoint.name}: {name}", "the plan has no such tensor.", "Merge again.")
        elif wanted[name] != found:
            yield Problem(
                f"{checkpoint.name}: {name}", f"it is {found}, the plan says {wanted[name]}.", "Merge again."
            )
    missing = [name for name in wanted if name not in checkpoint.tensors]
    if missing:
        yield Problem(
            checkpoint.name,
            f"{len(missing)} tensors of the plan are missing, such as {', '.join(missing[:3])}.",
            "Merge again.",
        )
    if dict(checkpoint.config) != plan.manifest["config"]:
        yield Problem(
            f"{checkpoint.name}/config.json", "it is not the config that the plan says.", "Merge again."
        )


def _index_problems(checkpoint: Checkpoint) -> Iterator[Problem]:
    """A complete set of files can be read without an index; loaders want one all the same."""
    if len(checkpoint.files) > 1 and not (Path(checkpoint.root) / INDEX_FILE).is_file():
        yield Problem(
            checkpoint.name,
            f"it has {len(checkpoint.files)} weight files and no {INDEX_FILE}, so that no loader finds them.",
            "Copy the index from where the files come from, or merge again.",
        )


def _config_problems(checkpoint: Checkpoint) -> Iterator[Problem]:
    where = f"{checkpoint.name}/config.json"
    yield from _layer_problems(checkpoint, where)
    yield from _dtype_problems(checkpoint, where)
    yield from _head_problems(checkpoint, where)


def _layer_problems(checkpoint: Checkpoint, where: str) -> Iterator[Problem]:
    """The number of layers that the config counts must be there; unknown layouts are left alone."""
    config = checkpoint.config
    rules = load_rules(str(config.get("model_type") or "") or None)
    section = text_section(config)
    counts = {key: section[key] for key in rules.depth.counts if isinstance(section.get(key), int)}
    found = stacks(checkpoint.tensors, config)
    if not counts or not found or any(stack.is_main for stack in found):
        return
    if all(stack.num_layers not in counts.values() for stack in found):
        have = ", ".join(f"{stack.prefix} has {stack.num_layers}" for stack in found)
        said = ", ".join(f"{key} is {value}" for key, value in counts.items())
        yield Problem(where, f"{said}, but {have} layers.", "Correct the config, or merge again.")


def _dtype_problems(checkpoint: Checkpoint, where: str) -> Iterator[Problem]:
    said = _declared_dtype(checkpoint.config)
    mergeable = any(tensor.dtype.is_mergeable for tensor in checkpoint.tensors.values())
    if said is None or not mergeable or checkpoint.config.get("quantization_config"):
        return
    main = main_dtype(checkpoint)
    known = {config_name(dtype) for dtype in DType if dtype.is_mergeable}
    if said in known and said != config_name(main):
        yield Problem(
            where, f"it says {said}, but most tensors are {config_name(main)}.", "Correct the config's dtype."
        )


def _declared_dtype(config: Mapping[str, Any]) -> str | None:
    for section in (config, text_section(config)):
        for key in ("dtype", "torch_dtype"):
            if isinstance(section.get(key), str):
                return str(section[key]).removeprefix("torch.")
    return None


def _head_problems(checkpoint: Checkpoint, where: str) -> Iterator[Problem]:
    pair = tied_pair(checkpoint.tensors, checkpoint.config)
    if pair is None:
        return
    embedding = checkpoint.tensors[pair.embedding]
    architectures = [str(name) for name in checkpoint.config.get("architectures") or ()]
    generates = any(name.endswith(("ForCausalLM", "LMHeadModel")) for name in architectures)
    if pair.declared is False and generates and pair.head not in checkpoint.tensors:
        yield Problem(
            where,
            f"tie_word_embeddings is false, but {pair.head} is not stored.",
            "A loader would start it at random: store the head, or tie it.",
        )
    yield from _vocabulary_problems(checkpoint, embedding, where)


def _vocabulary_problems(checkpoint: Checkpoint, embedding: StoredTensor, where: str) -> Iterator[Problem]:
    size = text_section(checkpoint.config).get("vocab_size")
    if isinstance(size, int) and embedding.shape and embedding.shape[0] != size:
        yield Problem(
            where,
            f"vocab_size is {size}, but {embedding.name} has {embedding.shape[0]} rows.",
            "Correct vocab_size.",
        )
