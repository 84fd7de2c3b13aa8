"""The base and the fine-tunes of a family, made when a test first asks for them and kept for the others."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from kits.moe_maker import FAMILIES, Ancestry, AncestryOf, make_ancestry
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
def ancestry_of(tmp_path_factory: pytest.TempPathFactory) -> AncestryOf:
    """Makes the base and two fine-tunes of a family, once."""
    root: Path = tmp_path_factory.mktemp("moe_families")
    made: dict[str, Ancestry] = {}

    def ancestry(name: str) -> Ancestry:
        if name not in made:
            made[name] = make_ancestry(FAMILIES[name], root / name)
        return made[name]

    return ancestry
