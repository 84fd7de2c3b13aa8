"""Two models of a family, made when a test first asks for them and kept for the others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from kits.model_parents import Parents, make_parents
from kits.model_types import ModelType
from kits.silence import small_and_silent  # noqa: F401


@pytest.fixture(scope="session")
def parents_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[ModelType], Parents]:
    root: Path = tmp_path_factory.mktemp("model_types")
    made: dict[str, Parents] = {}

    def parents(kind: ModelType) -> Parents:
        if kind.name not in made:
            made[kind.name] = make_parents(kind, root / kind.name)
        return made[kind.name]

    return parents
