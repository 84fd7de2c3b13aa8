"""A merge as vLLM takes it: a source for its weight transfer, and its load format ``raymerge``.

vLLM is imported by whoever it calls here, and never by importing this module; so is what merges."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raymerge.errors import (
    CheckpointError,
    OptionError,
    PlanError,
    Problem,
    TargetError,
    VerificationError,
    shortlist,
)

if TYPE_CHECKING:
    import torch

    from raymerge.api import RecipesLike, TensorStream
    from raymerge.options import RunOptions
    from raymerge.planner.merges import PlannedMerge

LOAD_FORMAT = "raymerge"
RECIPE_FILE = "recipe.yml"
_INDEX_ENDING = ".index.json"
_OPTIONS = ("memory", "threads")


def weight_source(stream: TensorStream) -> Any:
    """A stream as the ``WeightSource`` of vLLM's weight transfer; every round makes its tensors anew."""
    from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource

    class MergeSource(WeightSource):  # type: ignore[misc]  # without vLLM it is of no known type
        def metadata(self) -> list[Any]:
            return [ParamMeta(*each) for each in stream.metadata()]

        def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
            return iter(stream)

    return MergeSource()


def write_directory(recipe: RecipesLike, directory: str | Path) -> None:
    """Make a directory for ``vllm serve DIRECTORY --load-format raymerge``: config, tokenizer and recipe.

    Raises TargetError: there is something else; PlanError: a model is named by a path that means something
    else where vLLM runs; otherwise as ``stream``."""
    from raymerge.api import plan_for
    from raymerge.runtime.driver.merge_store import files_beside

    merges = plan_for(recipe, "merged")
    merges[-1].plan.require()
    _check_absolute(merges)
    place = Path(directory)
    if place.exists() and any(place.iterdir()):
        what = "there is something here already."
        raise TargetError(Problem(str(place), what, "Choose another directory, or clear it."))
    texts = [str(each.plan.manifest["recipe_text"]).rstrip("\n") for each in merges]
    files = {key: content for key, content in files_beside(merges).items() if not key.endswith(_INDEX_ENDING)}
    for key, content in {**files, RECIPE_FILE: ("\n---\n".join(texts) + "\n").encode()}.items():
        path = place / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def _check_absolute(merges: Sequence[PlannedMerge]) -> None:
    sources = [each for merge in merges for each in merge.sources if each.checkpoint.unwritten is None]
    names = [path for each in sources for path in (each.reference.path, each.reference.lora_path) if path]
    what = "it is a path from the current directory, and vLLM may run in another."
    problems = [
        Problem(name, what, "Write the absolute path.")
        for name in dict.fromkeys(names)
        if os.path.exists(name) and not os.path.isabs(name)
    ]
    if problems:
        raise PlanError(problems)


def register() -> None:
    """Make the load format known; vLLM calls it in each of its processes (``vllm.general_plugins``)."""
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    @register_model_loader(LOAD_FORMAT)
    class MergeLoader(BaseModelLoader):  # type: ignore[misc]
        """Merges the recipe of a directory into a model. ``model_loader_extra_config`` may have ``memory``,
        such as 4GiB, and ``threads``."""

        def download_model(self, model_config: Any) -> None:
            # Models of the Hub are fetched when a plan is made.
            _stream(model_config, self.load_config)

        def load_weights(self, model: torch.nn.Module, model_config: Any) -> None:
            stream = _stream(model_config, self.load_config)
            loaded = model.load_weights(iter(stream))  # type: ignore[operator]
            # Parameters of quantised layers have other names than tensors.
            if loaded is not None and getattr(model_config, "quantization", None) is None:
                _check_loaded({name for name, _ in model.named_parameters()} - loaded, model_config.model)


def _check_loaded(missing: set[str], place: str) -> None:
    if missing:
        what = f"{len(missing)} parameters of vLLM's model got no weights: {shortlist(sorted(missing))}."
        raise VerificationError(Problem(place, what, "Compare its config.json with the recipe's models."))


def _stream(model_config: Any, load_config: Any) -> TensorStream:
    from raymerge.api import stream

    recipe = os.path.join(model_config.model, RECIPE_FILE)
    if not os.path.isfile(recipe):
        what = "there is no recipe in this directory."
        remedy = "Make one by raymerge.serving.vllm.write_directory."
        raise CheckpointError(Problem(recipe, what, remedy))
    return stream(recipe, _options(load_config.model_loader_extra_config or {}))


def _options(given: Mapping[str, Any]) -> RunOptions:
    from raymerge.options import RunOptions
    from raymerge.units import parse_size

    unknown = [name for name in given if name not in _OPTIONS]
    if unknown:
        what = f"{', '.join(unknown)} is not one of {', '.join(_OPTIONS)}."
        raise OptionError(Problem("model_loader_extra_config", what, "Take it out."))
    memory = given.get("memory")
    try:
        limit = None if memory is None else parse_size(memory)
    except ValueError as error:
        raise OptionError(Problem("model_loader_extra_config", f"memory: {error}.", "")) from error
    return RunOptions(memory=limit, threads=given.get("threads"))
