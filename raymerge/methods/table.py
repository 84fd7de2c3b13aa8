"""The table of merge methods. A new one is a file beside this and a line here."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from raymerge.methods.arcee_fusion import ARCEE_FUSION
from raymerge.methods.breadcrumbs import BREADCRUMBS, BREADCRUMBS_TIES
from raymerge.methods.consensus_ta import CONSENSUS_TA
from raymerge.methods.dare import DARE_LINEAR, DARE_TIES
from raymerge.methods.della import DELLA, DELLA_LINEAR
from raymerge.methods.fisher import FISHER
from raymerge.methods.geometric_median import GEOMETRIC_MEDIAN
from raymerge.methods.internal import LARGEST, RENUMBER
from raymerge.methods.karcher import KARCHER
from raymerge.methods.linear import LINEAR
from raymerge.methods.lines import LINES
from raymerge.methods.method import Method
from raymerge.methods.model_stock import MODEL_STOCK
from raymerge.methods.multislerp import MULTISLERP
from raymerge.methods.nearswap import NEARSWAP
from raymerge.methods.nuslerp import NUSLERP
from raymerge.methods.passthrough import PASSTHROUGH
from raymerge.methods.ram import RAM, RAMPLUS_TL
from raymerge.methods.regmean import REGMEAN
from raymerge.methods.sce import SCE
from raymerge.methods.slerp import SLERP, SLERP_DELTA
from raymerge.methods.spectral import ISO_C, TSV_M
from raymerge.methods.task_arithmetic import TASK_ARITHMETIC
from raymerge.methods.ties import TIES
from raymerge.methods.upcycle import UPCYCLE

_METHODS: Mapping[str, Method] = MappingProxyType(
    {
        method.name: method
        for method in (
            LINEAR,
            FISHER,
            PASSTHROUGH,
            SLERP,
            NUSLERP,
            MULTISLERP,
            KARCHER,
            SLERP_DELTA,
            GEOMETRIC_MEDIAN,
            NEARSWAP,
            ARCEE_FUSION,
            TASK_ARITHMETIC,
            TIES,
            DARE_LINEAR,
            DARE_TIES,
            BREADCRUMBS,
            BREADCRUMBS_TIES,
            DELLA,
            DELLA_LINEAR,
            SCE,
            RAM,
            RAMPLUS_TL,
            CONSENSUS_TA,
            LINES,
            MODEL_STOCK,
            ISO_C,
            TSV_M,
            UPCYCLE,
            REGMEAN,
        )
    }
)


_INTERNAL: Mapping[str, Method] = MappingProxyType({each.name: each for each in (LARGEST, RENUMBER)})


def methods() -> Mapping[str, Method]:
    """All methods that a recipe's ``merge_method`` may name, in the order of the documentation."""
    return _METHODS


def find_method(name: str) -> Method | None:
    return _METHODS.get(name) or _INTERNAL.get(name)


def is_parameter(name: str) -> bool:
    return any(method.parameter(name) is not None for method in _METHODS.values())
