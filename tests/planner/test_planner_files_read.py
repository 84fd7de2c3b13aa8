"""Which files each segment reads: the same as its jobs read when they are made."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import pytest
from kits.adapter_maker import tiny_lora
from kits.checkpoint_maker import read_tensors
from kits.merge_cases import make_family
from kits.quantised_models import gpt_oss

from raymerge.api import plan
from raymerge.execute.ops import Jobs
from raymerge.merge_plan.expressions import Read, Scales
from raymerge.merge_plan.files_read import files_read


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    root = tmp_path_factory.mktemp("files_read")
    family = make_family(root / "family", hidden=256, files=2)
    lora = tiny_lora(root / "lora", read_tensors(family.base), 1)
    first, second = (gpt_oss(root / f"oss{seed}", seed).root for seed in (1, 2))
    base, tune = str(family.base), str(family.tunes[0])
    layer = {"layer_range": [0, 1]}
    return {
        "plain": _linear(base, tune),
        "adapter": _linear(f"{base}+{lora}", tune),
        "codes": _linear(str(first), str(second)),
        "repeated": {
            "merge_method": "passthrough",
            "slices": [{"sources": [{"model": each, **layer}]} for each in (base, tune, base)],
        },
    }


def _linear(*models: str) -> dict[str, Any]:
    entries = [{"model": model, "parameters": {"weight": 0.5}} for model in models]
    return {"merge_method": "linear", "models": entries}


def _files(job: Any, source: int = -1) -> Iterator[tuple[int, str]]:
    """Every file that anything within a job names."""
    if isinstance(job, Read):
        source = job.source
        yield source, job.key
    if isinstance(job, Scales):
        yield from ((source, key) for key in (job.key, job.tensor_key) if key)
    if isinstance(job, tuple):
        for each in job:
            yield from _files(each, source)
    elif is_dataclass(job):
        for field in fields(job):
            yield from _files(getattr(job, field.name), source)


@pytest.mark.parametrize("case", ["plain", "adapter", "codes", "repeated"])
def test_a_segment_reads_what_its_jobs_read(case: str, cases: dict[str, dict[str, Any]]) -> None:
    made = plan(cases[case])
    jobs = Jobs(made)
    found = files_read(made)
    assert len(found) == len(made["segments"])
    for number, files in enumerate(found):
        assert files == frozenset(_files(jobs.rows(number)))
    sources = {source for files in found for source, _ in files}
    assert len(sources) == len(made.manifest["sources"])
