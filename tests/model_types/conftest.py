"""Two models of a family, made when a test first asks for them and kept for the others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from kits.model_parents import Parents, make_parents
from kits.model_types import ModelType
from transformers.utils import logging


@pytest.fixture(scope="module", autouse=True)
def small_and_silent() -> Iterator[None]:
    """One thread, since models this small only wait for more; and none of transformers' progress bars."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    yield
    logging.enable_progress_bar()  # type: ignore[no-untyped-call]
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def parents_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[ModelType], Parents]:
    """Makes the parents of a family, once."""
    root: Path = tmp_path_factory.mktemp("model_types")
    made: dict[str, Parents] = {}

    def parents(kind: ModelType) -> Parents:
        if kind.name not in made:
            made[kind.name] = make_parents(kind, root / kind.name)
        return made[kind.name]

    return parents
