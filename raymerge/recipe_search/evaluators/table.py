"""Every kind of evaluator."""

from __future__ import annotations

from raymerge.recipe_search.evaluators.command import COMMAND
from raymerge.recipe_search.evaluators.evaluator import EvaluatorKind
from raymerge.recipe_search.evaluators.lm_eval import LM_EVAL
from raymerge.recipe_search.evaluators.server import SERVER
from raymerge.recipe_search.evaluators.texts import TEXTS

KINDS: dict[str, EvaluatorKind] = {kind.key: kind for kind in (TEXTS, COMMAND, SERVER, LM_EVAL)}
