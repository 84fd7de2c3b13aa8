"""Which experts, and which of their neurons, belong together in models that were trained apart."""

from raymerge.stages.alignment.work import AlignWork, align_work

__all__ = ["AlignWork", "align_work"]
