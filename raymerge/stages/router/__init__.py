"""Router rows of mixtures of experts, from prompts that the base model reads layer by layer."""

from raymerge.stages.router.work import gate_work

__all__ = ["gate_work"]
