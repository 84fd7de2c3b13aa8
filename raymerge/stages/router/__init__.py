"""Router rows of mixtures of experts, from prompts that the base model reads layer by layer."""

from raymerge.stages.router.work import GateWork, gate_work

__all__ = ["GateWork", "gate_work"]
