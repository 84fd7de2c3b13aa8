"""Finishes a directory whose shards are all written: companions, card, config, and the index last."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from raymerge.checkpoints.index import INDEX_FILE
from raymerge.errors import Problem, VerificationError
from raymerge.merge_plan.tables import Plan, index_bytes
from raymerge.planner.config.config import config_bytes
from raymerge.planner.inputs.source import Source
from raymerge.publish.card import Parent, model_card
from raymerge.publish.companions import copy_companions
from raymerge.storage.hub.addresses import hub_place, is_hub_place
from raymerge.storage.hub.cache import snapshot_revision
from raymerge.storage.store import ReadStore, WriteStore


def finish_companions(
    plan: Plan, donor: ReadStore, target: WriteStore, *, companions: Sequence[str], parents: Sequence[Parent]
) -> None:
    """Copy the donor's companion files, write those that the plan has instead, and the model card."""
    copy_companions(donor, target, kept_companions(plan, companions))
    for name, content in written_files(plan).items():
        target.write_atomic(name, content)
    recipe = plan.manifest["recipe"]
    base = recipe.get("base_model")
    card = model_card(
        str(plan.manifest["recipe_text"]),
        parents,
        method=str(plan.manifest["method"]),
        base=str(base) if base else None,
        digest=plan.digest,
        seed=int(plan.manifest["seed"]),
        version=str(plan.manifest["raymerge"]),
        is_raw=not plan.manifest["config"],
    )
    target.write_atomic("README.md", card.encode())


def kept_companions(plan: Plan, companions: Sequence[str]) -> tuple[str, ...]:
    """The donor's companions that are copied: not those that the plan writes anew or leaves out."""
    others = {*plan["files"].column("name").to_pylist(), *plan.manifest["left_out"]}
    return tuple(key for key in companions if key not in others)


def written_files(plan: Plan) -> Mapping[str, bytes]:
    """The files beside the weights that the plan has, by name."""
    return {row["name"]: row["content"] for row in plan["files"].to_pylist()}


def check_shards(plan: Plan, target: ReadStore) -> None:
    """Read every shard's header back and compare it with the plan.

    Raises:
        VerificationError: a shard is not what was planned.
    """
    shards = plan["shards"].to_pylist()
    sizes = {file.key: file for file in target.files()}
    problems: list[Problem] = []
    for shard in shards:
        file = sizes.get(shard["name"])
        if file is None or file.nbytes != shard["nbytes"]:
            size = "absent" if file is None else f"{file.nbytes} bytes long"
            problems.append(
                Problem(
                    shard["name"], f"it is {size}, the plan says {shard['nbytes']} bytes.", "Merge again."
                )
            )
        elif target.read(shard["name"], 0, len(shard["header"])) != shard["header"]:
            problems.append(Problem(shard["name"], "its header is not the planned one.", "Merge again."))
    if problems:
        raise VerificationError(problems)


def finish_config(
    plan: Plan, donor: ReadStore, target: WriteStore, *, donor_config: Mapping[str, Any]
) -> None:
    """Write config.json, unless the merge is of tensors only, and after it the index of several shards.

    An unchanged config is copied as the bytes that the donor has.
    """
    for name, content in config_files(plan, donor, donor_config).items():
        target.write_atomic(name, content)
    target.sync_directory()


def config_files(plan: Plan, donor: ReadStore, donor_config: Mapping[str, Any]) -> Mapping[str, bytes]:
    """What ``finish_config`` writes, by name, in its order."""
    config, found = plan.manifest["config"], dict[str, bytes]()
    if config:
        found["config.json"] = _donor_text(donor) if config == dict(donor_config) else config_bytes(config)
    shards = plan["shards"].column("name").to_pylist()
    if len(shards) > 1:
        found[INDEX_FILE] = index_bytes(plan)
    return found


def finished_files(plan: Plan, companions: Sequence[str]) -> frozenset[str]:
    """Every file that a finished checkpoint has, but for the record of its run."""
    shards = plan["shards"].column("name").to_pylist()
    index = [INDEX_FILE] if len(shards) > 1 else []
    config = ["config.json"] if plan.manifest["config"] else []
    kept = kept_companions(plan, companions)
    return frozenset((*shards, *index, *config, "README.md", *kept, *written_files(plan)))


def parents_of(sources: Sequence[Source]) -> tuple[Parent, ...]:
    """The recipe's models as the card lists them."""
    commits = [snapshot_revision(source.checkpoint.root) for source in sources]
    return tuple(
        Parent(_called(source.reference.path), commit or source.reference.revision, is_local=commit is None)
        for source, commit in zip(sources, commits, strict=True)
    )


def _called(path: str) -> str:
    """What the Hub calls a model of its own; of others what the recipe does."""
    return hub_place(path).repository if is_hub_place(path) else path


def _donor_text(donor: ReadStore) -> bytes:
    size = next(file.nbytes for file in donor.files() if file.key == "config.json")
    return donor.read("config.json", 0, size)
