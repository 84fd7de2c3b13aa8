"""Manifests as YAML that people read."""

from __future__ import annotations

from collections.abc import Iterable

import yaml

from raymerge.deploy.manifests.pods import Manifest


class _Dumper(yaml.SafeDumper):
    """Writes texts of several lines as blocks, and repeats what occurs twice."""

    def ignore_aliases(self, data: object) -> bool:
        """An alias saves lines and hides what a reader looks for."""
        del data
        return True


def _block(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _block)


def as_yaml(manifests: Iterable[Manifest]) -> str:
    """The documents, one after the other, with their keys in the order in which they were made."""
    return yaml.dump_all(
        manifests, Dumper=_Dumper, sort_keys=False, explicit_start=True, allow_unicode=True, width=110
    )
