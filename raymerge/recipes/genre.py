"""What messages call a recipe."""

from __future__ import annotations

from raymerge.documents.genre import Genre
from raymerge.errors import RecipeError

RECIPE = Genre(
    noun="recipe",
    opening="merge_method: ...",
    error=RecipeError,
    about_secrets=(
        "A recipe is kept in what it makes, for all to read: take it out, make it invalid where it came "
        "from, and log in with 'hf auth login' or set HF_TOKEN."
    ),
)
"""The sort of text that says what to merge."""
