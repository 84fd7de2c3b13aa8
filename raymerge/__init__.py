"""raymerge merges large language models: verified checkpoints, bounded memory, the same bytes at any scale.

Names are imported lazily, so that ``import raymerge`` costs nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from raymerge.api import AuditOptions as AuditOptions
    from raymerge.api import InMemoryModel as InMemoryModel
    from raymerge.api import RunOptions as RunOptions
    from raymerge.api import RunResult as RunResult
    from raymerge.api import SearchOptions as SearchOptions
    from raymerge.api import audit as audit
    from raymerge.api import calibrate as calibrate
    from raymerge.api import conversion as conversion
    from raymerge.api import diagnose as diagnose
    from raymerge.api import diff as diff
    from raymerge.api import evaluate as evaluate
    from raymerge.api import extract_lora as extract_lora
    from raymerge.api import inspect as inspect
    from raymerge.api import merge_adapters as merge_adapters
    from raymerge.api import plan as plan
    from raymerge.api import plan_all as plan_all
    from raymerge.api import plan_search as plan_search
    from raymerge.api import plan_sweep as plan_sweep
    from raymerge.api import push as push
    from raymerge.api import replay as replay
    from raymerge.api import report as report
    from raymerge.api import report_difference as report_difference
    from raymerge.api import search as search
    from raymerge.api import stream as stream
    from raymerge.api import submit as submit
    from raymerge.api import submit_sweep as submit_sweep
    from raymerge.api import suggest_recipe as suggest_recipe
    from raymerge.api import suggestion_text as suggestion_text
    from raymerge.api import transplantation as transplantation
    from raymerge.api import verify as verify
    from raymerge.api import verify_load as verify_load
    from raymerge.cli.render.notebook import progress as progress

__all__ = [
    "AuditOptions",
    "InMemoryModel",
    "RunOptions",
    "RunResult",
    "SearchOptions",
    "audit",
    "calibrate",
    "conversion",
    "diagnose",
    "diff",
    "evaluate",
    "extract_lora",
    "inspect",
    "merge_adapters",
    "plan",
    "plan_all",
    "plan_search",
    "plan_sweep",
    "progress",
    "push",
    "replay",
    "report",
    "report_difference",
    "search",
    "stream",
    "submit",
    "submit_sweep",
    "suggest_recipe",
    "suggestion_text",
    "transplantation",
    "verify",
    "verify_load",
]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'raymerge' has no attribute '{name}'")
    if name == "progress":
        from raymerge.cli.render import notebook

        return notebook.progress
    from raymerge import api

    return getattr(api, name)
