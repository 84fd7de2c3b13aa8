"""Structure: names, shapes, dtypes, index both ways, sizes, a config that agrees with the tensors, and files
beside the weights that are those which were published."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from raymerge.checkpoints.index import INDEX_FILE
from raymerge.checkpoints.pickles import read_pickled
from raymerge.checkpoints.source import Checkpoint, open_checkpoint
from raymerge.errors import Problem, UserError, VerificationError
from raymerge.merge_plan.tables import Plan, load_plan
from raymerge.planner.inputs.consistency import config_problems
from raymerge.planner.inputs.sources import collector_paused
from raymerge.storage.addresses import is_remote, parse_place, shown
from raymerge.storage.open import open_store
from raymerge.storage.temporary import fetched
from raymerge.verifier.companions import file_problems, stray_weights

RECORD_PLAN = Path("raymerge") / "plan"
"""Where a merged checkpoint keeps the plan that it was made by."""
_MADE = frozenset({f"{RECORD_PLAN.parent.as_posix()}/{name}" for name in ("ledger.jsonl", "run.json")})
"""What only a merge leaves: a checkpoint that has one of them was made by a plan."""


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
    are_tensors_sound: bool
    """Whether nothing is wrong with the tensors, config and index, whatever is with the files beside them."""

    def require(self) -> Verdict:
        """This verdict, if nothing is wrong.

        Raises:
            VerificationError: with every problem.
        """
        if self.problems:
            raise VerificationError(self.problems)
        return self


def verify_structure(root: Path | str) -> Verdict:
    """Verify a checkpoint's structure, wherever it is; one that raymerge made also against its plan.

    Never raises for what is wrong with the checkpoint: the verdict says it.
    """
    with collector_paused():
        return _verdict(root)


def _verdict(root: Path | str) -> Verdict:
    name = shown(str(root))
    try:
        checkpoint = open_checkpoint(root, name, read_pickle=read_pickled)
        keys = _keys(str(root))
        plan = _recorded_plan(str(root), keys)
    except UserError as error:
        return Verdict(name, 0, 0, 0, False, error.problems, are_tensors_sound=False)
    problems = [*config_problems(checkpoint)]
    if INDEX_FILE not in keys:
        problems = [*_index_problems(checkpoint), *problems]
    if plan is not None:
        problems += _plan_problems(checkpoint, plan)
    beside = _beside_problems(checkpoint, plan)
    return Verdict(
        path=name,
        tensors=len(checkpoint.tensors),
        nbytes=sum(file.nbytes for file in checkpoint.files),
        files=len(checkpoint.files),
        against_plan=plan is not None,
        problems=(*problems, *beside),
        are_tensors_sound=not problems,
    )


def _beside_problems(checkpoint: Checkpoint, plan: Plan | None) -> list[Problem]:
    """What is wrong with the files beside the weights."""
    if plan is None:
        return list(stray_weights(checkpoint))
    try:
        with open_store(checkpoint.root) as store:
            return list(file_problems(store, plan, checkpoint.name))
    except UserError as error:
        return list(error.problems)


def _keys(root: str) -> frozenset[str]:
    with open_store(root) as store:
        return frozenset(each.key for each in store.files())


def _recorded_plan(root: str, keys: Collection[str]) -> Plan | None:
    """The plan that a checkpoint was made by; None where it has no record of raymerge.

    Raises:
        PlanError: it has a record, and no whole plan in it.
    """
    plan = f"{RECORD_PLAN.as_posix()}/"
    is_made = any(key in _MADE or key.startswith(plan) for key in keys)
    # No store lists a directory that lost its files; on this machine it is there all the same.
    if not is_made and (is_remote(root) or not Path(parse_place(root).text, RECORD_PLAN).is_dir()):
        return None
    with fetched(root, [key for key in keys if key.startswith(plan)]) as here:
        return load_plan(here / RECORD_PLAN)


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
    if len(checkpoint.files) > 1:
        yield Problem(
            checkpoint.name,
            f"it has {len(checkpoint.files)} weight files and no {INDEX_FILE}, so that no loader finds them.",
            "Copy the index from where the files come from, or merge again.",
        )
