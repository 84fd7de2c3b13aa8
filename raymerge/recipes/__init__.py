"""Recipes: read and checked, with the source position of every value."""

from raymerge.documents.fields import did_you_mean
from raymerge.recipes.entry import ModelReference, parse_reference
from raymerge.recipes.expert_set import AddedExpert, ExpertChange, ExpertSetRecipe
from raymerge.recipes.load import (
    Draft,
    MissingMethod,
    canonical,
    conversion_recipe,
    draft_mapping,
    draft_recipes,
    join_drafts,
    parse_recipe,
    parse_recipes,
    recipe_from_mapping,
    with_order_problems,
)
from raymerge.recipes.moe import RANDOM_GATES, Expert, MoeRecipe
from raymerge.recipes.order import AnyRecipe, merge_order, references
from raymerge.recipes.schema import (
    AdapterOutput,
    MethodRule,
    ModelEntry,
    ModuleEntry,
    OutputSlice,
    Recipe,
    TokenEntry,
    Tokenizer,
    TokenRow,
    ZeroRow,
)
from raymerge.recipes.settings import Conditional, Gradient, Scalar, Selector, Setting, Subject, evaluate

__all__ = [
    "RANDOM_GATES",
    "AdapterOutput",
    "AddedExpert",
    "AnyRecipe",
    "Conditional",
    "Draft",
    "Expert",
    "ExpertChange",
    "ExpertSetRecipe",
    "Gradient",
    "MethodRule",
    "MissingMethod",
    "ModelEntry",
    "ModelReference",
    "ModuleEntry",
    "MoeRecipe",
    "OutputSlice",
    "Recipe",
    "Scalar",
    "Selector",
    "Setting",
    "Subject",
    "TokenEntry",
    "TokenRow",
    "Tokenizer",
    "ZeroRow",
    "canonical",
    "conversion_recipe",
    "did_you_mean",
    "draft_mapping",
    "draft_recipes",
    "evaluate",
    "join_drafts",
    "merge_order",
    "parse_recipe",
    "parse_recipes",
    "parse_reference",
    "recipe_from_mapping",
    "references",
    "with_order_problems",
]
