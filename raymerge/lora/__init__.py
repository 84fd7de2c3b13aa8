"""Adapters extracted from two models, or merged from other adapters."""

from __future__ import annotations

from raymerge.lora.combine import AdapterMerge, adapter_problems, plan_adapters
from raymerge.lora.extract import ExtractOptions, Selection, extract_lora
from raymerge.lora.matrices import Limits
from raymerge.lora.writer import Combination, Extraction, LeftOut, ModuleReport, OnModule

__all__ = [
    "AdapterMerge",
    "Combination",
    "ExtractOptions",
    "Extraction",
    "LeftOut",
    "Limits",
    "ModuleReport",
    "OnModule",
    "Selection",
    "adapter_problems",
    "extract_lora",
    "plan_adapters",
]
