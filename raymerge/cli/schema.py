"""``raymerge schema``: what editors need to complete recipes and profiles, and to check them while typing."""

from __future__ import annotations

import sys
from typing import Annotated, Literal

import typer

from raymerge.cli.messages import command
from raymerge.runtime.workers.importing import heavy_imports


@command
def schema(
    document: Annotated[
        Literal["recipe", "profile"], typer.Argument(metavar="[recipe|profile]", help="Which documents.")
    ] = "recipe",
) -> int:
    """Print the JSON Schema of recipes or profiles, by which editors complete and check them."""
    with heavy_imports():
        from raymerge.deploy.profiles import profile_schema
        from raymerge.documents.json_schema import schema_text
        from raymerge.planner.recipe_schema import recipe_schema

    sys.stdout.write(schema_text(recipe_schema() if document == "recipe" else profile_schema()))
    return 0
