"""What the user wrote: recipes, read and checked, with the place of every value."""

from raymerge.recipes.load import canonical, load_recipe, parse_recipe, recipe_from_mapping
from raymerge.recipes.moe import Expert, MoeRecipe
from raymerge.recipes.reference import ModelReference, parse_reference
from raymerge.recipes.schema import ModelEntry, ModuleEntry, OutputSlice, Recipe, SliceSource
from raymerge.recipes.settings import Choice, Conditional, Gradient, Scalar, Setting, evaluate
from raymerge.recipes.suggest import did_you_mean
from raymerge.recipes.tokenizer import TokenEntry, Tokenizer, TokenRow, ZeroRow

__all__ = [
    "Choice",
    "Conditional",
    "Expert",
    "Gradient",
    "ModelEntry",
    "ModelReference",
    "ModuleEntry",
    "MoeRecipe",
    "OutputSlice",
    "Recipe",
    "Scalar",
    "Setting",
    "SliceSource",
    "TokenEntry",
    "TokenRow",
    "Tokenizer",
    "ZeroRow",
    "canonical",
    "did_you_mean",
    "evaluate",
    "load_recipe",
    "parse_recipe",
    "parse_reference",
    "recipe_from_mapping",
]
