"""The base and the fine-tunes of a family, made when a test first asks for them and kept for the others."""

from __future__ import annotations

from pathlib import Path

import pytest
from kits.moe_maker import FAMILIES, FURTHER, Ancestry, AncestryOf, make_ancestry
from kits.silence import small_and_silent  # noqa: F401


@pytest.fixture(scope="session")
def ancestry_of(tmp_path_factory: pytest.TempPathFactory) -> AncestryOf:
    root: Path = tmp_path_factory.mktemp("moe_families")
    made: dict[str, Ancestry] = {}

    def ancestry(name: str) -> Ancestry:
        if name not in made:
            made[name] = make_ancestry({**FAMILIES, **FURTHER}[name], root / name)
        return made[name]

    return ancestry
