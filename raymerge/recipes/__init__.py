"""What the user wrote: recipes, read and checked, with the place of every value."""

from raymerge.documents.suggest import did_you_mean
from raymerge.recipes.adapter import AdapterOutput
from raymerge.recipes.conversion import conversion_recipe
from raymerge.recipes.draft import UNREADABLE, Draft, Unnamed, join_drafts, with_order_problems
from raymerge.recipes.expert_change import AddedExpert, ExpertChange
from raymerge.recipes.expert_ids import ExpertGroups, ExpertIds, PerLayer
from raymerge.recipes.expert_set import ExpertSetRecipe
from raymerge.recipes.load import (
    canonical,
    draft_mapping,
    draft_recipes,
    load_recipe,
    load_recipes,
    parse_recipe,
    parse_recipes,
    recipe_from_mapping,
)
from raymerge.recipes.moe import MoeRecipe, Trunk
from raymerge.recipes.moe_expert import RANDOM_GATES, Expert, GateMode
from raymerge.recipes.order import AnyRecipe, merge_order, references
from raymerge.recipes.reference import ModelReference, parse_reference
from raymerge.recipes.router import Align
from raymerge.recipes.rule import MethodRule
from raymerge.recipes.schema import ModelEntry, ModuleEntry, OutputSlice, Recipe, SliceSource
from raymerge.recipes.selector import ROLE_NAMES, Selector, Subject
from raymerge.recipes.settings import Choice, Conditional, Gradient, Scalar, Setting, evaluate
from raymerge.recipes.tokenizer import TokenEntry, Tokenizer, TokenRow, ZeroRow

__all__ = [
    "RANDOM_GATES",
    "ROLE_NAMES",
    "UNREADABLE",
    "AdapterOutput",
    "AddedExpert",
    "Align",
    "AnyRecipe",
    "Choice",
    "Conditional",
    "Draft",
    "Expert",
    "ExpertChange",
    "ExpertGroups",
    "ExpertIds",
    "ExpertSetRecipe",
    "GateMode",
    "Gradient",
    "MethodRule",
    "ModelEntry",
    "ModelReference",
    "ModuleEntry",
    "MoeRecipe",
    "OutputSlice",
    "PerLayer",
    "Recipe",
    "Scalar",
    "Selector",
    "Setting",
    "SliceSource",
    "Subject",
    "TokenEntry",
    "TokenRow",
    "Tokenizer",
    "Trunk",
    "Unnamed",
    "ZeroRow",
    "canonical",
    "conversion_recipe",
    "did_you_mean",
    "draft_mapping",
    "draft_recipes",
    "evaluate",
    "join_drafts",
    "load_recipe",
    "load_recipes",
    "merge_order",
    "parse_recipe",
    "parse_recipes",
    "parse_reference",
    "recipe_from_mapping",
    "references",
    "with_order_problems",
]
