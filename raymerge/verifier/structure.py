"""Structure: names, shapes, dtypes, index both ways, sizes, and a config that agrees with the tensors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from raymerge.checkpoints.index import INDEX_FILE
from raymerge.checkpoints.source import Checkpoint, open_checkpoint
from raymerge.errors import Problem, UserError, VerificationError
from raymerge.planner.collector import collector_paused
from raymerge.planner.consistency import config_problems
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
    with collector_paused():
        return _verdict(root)


def _verdict(root: Path) -> Verdict:
    try:
        checkpoint = open_checkpoint(root, str(root))
        plan = load_plan(root / RECORD_PLAN) if (root / RECORD_PLAN).is_dir() else None
    except UserError as error:
        return Verdict(str(root), 0, 0, 0, False, error.problems)
    problems = [*_index_problems(checkpoint), *config_problems(checkpoint)]
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
