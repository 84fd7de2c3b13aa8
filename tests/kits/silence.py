"""How tiny models of transformers are tested."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
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
