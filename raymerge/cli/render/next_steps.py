"""What is useful after a command, with the names that the command had."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Iterator, Sequence

from raymerge.cli.render.ending import Step
from raymerge.storage.addresses import is_remote, join

_MUCH = 0.1
"""Of a change, left out by an adapter: more rank may be worth it."""


def after_merge(
    output: str, lead: str = "", *, is_reported: bool = False, num_merged: int = 1, is_loadable: bool = True
) -> Iterator[Step]:
    """``lead``: the model whose layout the result has; "" where it is none that anybody can name or compare.
    ``num_merged``: tensors that a method made of several; of the others a report has nothing to say.
    ``is_loadable``: whether transformers loads it."""
    place = shlex.quote(output)
    if not num_merged:
        yield Step(f"raymerge inspect {place}", "what is in it")
    elif not is_reported:
        yield Step(f"raymerge report {place}", "a page of what the parents change")
    yield _proof(place, is_loadable=is_loadable)
    if lead:
        yield Step(f"raymerge diff {shlex.quote(lead)} {place}", "how far it is from that parent, by role")
    elif is_loadable:
        yield _proof(place, is_loadable=False)


def _proof(place: str, *, is_loadable: bool) -> Step:
    if is_loadable:
        return Step(f"raymerge verify {place} --level load", "loads it with transformers")
    return Step(f"raymerge verify {place} --level audit", "recomputes samples from the sources")


def after_sweep(output: str, names: Sequence[str], *, is_loadable: bool = True) -> Iterator[Step]:
    places = [shlex.quote(join(output, name)) for name in names]
    yield Step(f"raymerge report {places[0]}", "a page of what the parents change")
    yield _proof(places[0], is_loadable=is_loadable)
    if len(places) > 1:
        yield Step(f"raymerge diff {places[0]} {places[-1]}", "how far they are apart, by role")


def after_conversion(output: str, model: str, *, is_loadable: bool = True) -> Iterator[Step]:
    place = shlex.quote(output)
    yield Step(f"raymerge diff {shlex.quote(model)} {place}", "what the format lost, by role")
    yield _proof(place, is_loadable=is_loadable)
    yield Step(f"raymerge inspect {place}", "what is stored how")


def after_adapter(output: str) -> Iterator[Step]:
    loading = f"print(Auto.from_pretrained({json.dumps(output)}))"
    load = f"from peft import AutoPeftModelForCausalLM as Auto; {loading}"
    yield Step(f"python -c {shlex.quote(load)}", "loads it with peft, on its model")


def after_extraction(output: str, model: str, base: str, rank: int, error: float) -> Iterator[Step]:
    """``error``: the length of what is not in the adapter, over that of the whole change."""
    yield from after_adapter(output)
    if error > _MUCH:
        names = map(shlex.quote, (model, "--base", base, "-o", f"{output}-rank-{2 * rank}"))
        yield Step(f"raymerge extract-lora {' '.join(names)} --rank {2 * rank}", "keeps more of the change")


def after_rehearsal() -> Iterator[Step]:
    yield Step(shlex.join(["raymerge", *(each for each in sys.argv[1:] if each != "--dry-run")]), "does it")


def after_stop(output: str, *, is_begun: bool) -> Iterator[Step]:
    yield Step(shlex.join(["raymerge", *sys.argv[1:]]), "goes on from there")
    if is_begun:
        yield Step(f"raymerge logs {shlex.quote(output)}", "what it told so far")


def after_sent(run: str, output: str, exit_code: int) -> Iterator[Step]:
    """``exit_code`` of a run that another machine carried out."""
    from raymerge.checkpoints.source import CONFIG_FILE

    if exit_code:
        yield Step(f"raymerge logs {run}", "what it told")
    elif is_remote(output) or os.path.isfile(os.path.join(output, CONFIG_FILE)):
        yield from after_merge(output)
    else:
        yield Step(f"raymerge status {run}", f"its report; {output} is a place of the cluster's")
