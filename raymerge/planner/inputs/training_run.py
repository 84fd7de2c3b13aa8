"""The checkpoints of a training run as they are stored, for recipes that average them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

from raymerge.checkpoints.training_steps import StepContents, sampled_digest, step_contents
from raymerge.recipes.training_run import RunFiles, local_directories
from raymerge.storage.addresses import is_remote
from raymerge.storage.open import Lookup, open_store, resolve_source


def run_files(lookup: Lookup, recipe: Callable[[str], str]) -> RunFiles:
    """``recipe`` gives the text of the recipe that a checkpoint was made from."""

    def directories(place: str) -> Sequence[str]:
        if not is_remote(place):
            return local_directories(place)
        with open_store(resolve_source(place, lookup=lookup)) as store:
            return sorted({file.key.split("/")[0] for file in store.files() if "/" in file.key})

    def contents(place: str) -> StepContents:
        with open_store(resolve_source(place, lookup=lookup)) as store:
            return step_contents(file.key for file in store.files())

    @cache
    def digest(place: str) -> str:
        with open_store(resolve_source(place, lookup=lookup)) as store:
            return sampled_digest(store)

    return RunFiles(directories, contents, digest, recipe)
