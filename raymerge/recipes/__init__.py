"""What the user wrote: recipes, read and checked, with the place of every value."""

from raymerge.recipes.adapter import AdapterOutput
from raymerge.recipes.load import (
    canonical,
    load_recipe,
    load_recipes,
    parse_recipe,
    parse_recipes,
    recipe_from_mapping,
)
from raymerge.recipes.moe import Expert, MoeRecipe
from raymerge.recipes.order import merge_order, references
from raymerge.recipes.reference import ModelReference, parse_reference
from raymerge.recipes.rule import MethodRule
from raymerge.recipes.schema import ModelEntry, ModuleEntry, OutputSlice, Recipe, SliceSource
from raymerge.recipes.selector import ROLE_NAMES, Selector, Subject
from raymerge.recipes.settings import Choice, Conditional, Gradient, Scalar, Setting, evaluate
from raymerge.recipes.suggest import did_you_mean
from raymerge.recipes.tokenizer import TokenEntry, Tokenizer, TokenRow, ZeroRow

__all__ = [
    "ROLE_NAMES",
    "AdapterOutput",
    "Choice",
    "Conditional",
    "Expert",
    "Gradient",
    "MethodRule",
    "ModelEntry",
    "ModelReference",
    "ModuleEntry",
    "MoeRecipe",
    "OutputSlice",
    "Recipe",
    "Scalar",
    "Selector",
    "Setting",
    "SliceSource",
    "Subject",
    "TokenEntry",
    "TokenRow",
    "Tokenizer",
    "ZeroRow",
    "canonical",
    "did_you_mean",
    "evaluate",
    "load_recipe",
    "load_recipes",
    "merge_order",
    "parse_recipe",
    "parse_recipes",
    "parse_reference",
    "recipe_from_mapping",
    "references",
]
