"""The model card: what was merged, from what, by which recipe, and how to get the same bytes again."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath, PureWindowsPath
from typing import Any

import yaml

_DRIVE = re.compile(r"[A-Za-z]:[\\/]|\\\\")
_NOT_IN_PATHS = r"\s\"'`,;:\[\]{}()<>|*?#+@"
_PLACES = re.compile(
    # Two parts at least, since "</s>" of a template is no path; and nothing before that makes it an address.
    rf"(?<![\w./:~<\\-])(?:~|file://)?/[^{_NOT_IN_PATHS}/]+/[^{_NOT_IN_PATHS}]*"
    rf"|~/[^{_NOT_IN_PATHS}]+"
    rf"|\b[A-Za-z]:[\\/][^{_NOT_IN_PATHS}]+"
    rf"|(?<!\\)\\\\[^{_NOT_IN_PATHS}\\]+\\[^{_NOT_IN_PATHS}]+"
)
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


@dataclass(frozen=True, slots=True)
class Parent:
    """One model that went into the merge."""

    name: str
    """As the recipe calls it: a Hub id or a path."""
    revision: str | None = None
    """Hub revision, where the recipe names one."""
    licence: str | None = None
    """Licence from its model card, where it has one."""
    is_local: bool = False
    """Whether it was read from a directory of its own, so that its name is none of the Hub's."""


def model_card(
    recipe_text: str,
    parents: Sequence[Parent],
    *,
    method: str,
    base: str | None,
    digest: str,
    seed: int,
    version: str,
    is_raw: bool = False,
) -> str:
    """README.md of the output.

    Args:
        recipe_text: the recipe as the user wrote it.
        parents: every model of the recipe, in recipe order.
        method: merge method.
        base: name of the base model, or None.
        digest: digest of the plan.
        seed: seed of the recipe.
        version: version of raymerge.
        is_raw: whether the parents are single files of tensors, which no library is known to load.
    """
    names = [parent.name for parent in parents]
    on_base = f" on the base {_code(without_places(base, names))}" if base else ""
    lines = [
        "---",
        yaml.safe_dump(
            _front_matter(() if is_raw else parents, is_raw=is_raw), sort_keys=False, allow_unicode=True
        ).rstrip("\n"),
        "---",
        "# Merged model",
        "",
        f"Merged by raymerge {version} with the method {_code(method)}{on_base}.",
        "",
        "## Parents",
        "",
        *(_parent_line(parent) for parent in parents),
        "",
        "## Recipe",
        "",
        _fenced(without_places(recipe_text, names)),
        "",
        "## Getting the same bytes",
        "",
        "The same recipe on the same parents gives the same plan. "
        f"Plan digest: {_code(digest)}. Seed: {seed}.",
        "",
    ]
    return "\n".join(lines)


def shown_name(name: str) -> str:
    """A parent's name fit to be published: of an absolute path only the last two parts."""
    name = name.removeprefix("file://")
    path = PureWindowsPath(name) if _DRIVE.match(name) else PurePosixPath(name)
    if not path.is_absolute() and not name.startswith("~"):
        return name
    return "/".join([part for part in path.parts if part not in (path.anchor, "~")][-2:])


def without_places(text: str, names: Sequence[str] = ()) -> str:
    """A text in which absolute paths, and these names where they are such, stand as ``shown_name`` has them.

    Args:
        text: a recipe, or what it calls a model.
        names: known beforehand, so that they are found whatever characters they hold.
    """
    for name in sorted(set(names), key=len, reverse=True):
        if (shown := shown_name(name)) != name:
            plain = shown.replace("\\", r"\\")
            text = re.sub(rf"{re.escape(name)}(?![\w./-])", plain, text)
    return _PLACES.sub(lambda found: shown_name(found.group()), text)


def _front_matter(parents: Sequence[Parent], *, is_raw: bool) -> dict[str, Any]:
    matter: dict[str, Any] = {}
    bases = list(dict.fromkeys(parent.name for parent in parents if _is_of_hub(parent)))
    if bases:
        matter["base_model"] = bases
    licences = {parent.licence for parent in parents}
    agreed = licences.pop() if len(licences) == 1 else None
    if agreed:
        matter["license"] = agreed
    if not is_raw:
        matter["library_name"] = "transformers"
    return matter | {"tags": ["merge", "raymerge"]}


def _is_of_hub(parent: Parent) -> bool:
    return not parent.is_local and _HUB_ID.fullmatch(parent.name) is not None


def _parent_line(parent: Parent) -> str:
    revision = f", revision {_code(parent.revision)}" if parent.revision else ""
    licence = f", licence {_code(parent.licence)}" if parent.licence else ""
    return f"- {_code(shown_name(parent.name))}{revision}{licence}"


def _fenced(text: str) -> str:
    """A fenced block that no run of backticks inside can close."""
    fence = "`" * max(3, _longest_run(text) + 1)
    return f"{fence}yaml\n{text.rstrip()}\n{fence}"


def _code(text: str) -> str:
    """A code span on one line that no backtick inside can close."""
    flat = " ".join(text.split())
    run = _longest_run(flat)
    return f"`{flat}`" if run == 0 else f"{'`' * (run + 1)} {flat} {'`' * (run + 1)}"


def _longest_run(text: str) -> int:
    return max((len(run) for run in re.findall(r"`+", text)), default=0)
