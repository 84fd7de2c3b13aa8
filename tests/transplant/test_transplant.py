"""A donor's vocabulary on a base's body: rows by independent means, configs, faults and refusals."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kits.adapter_maker import PREFIX, lora_config, write_adapter
from kits.checkpoint_maker import read_tensors
from kits.command_line import run_command
from kits.memory_meter import AllocationMeter
from kits.merge_cases import EventLog, digests, flip
from kits.transplants import (
    BYTE_LEVEL,
    EMBEDDING,
    HEAD,
    INLINE,
    METASPACE,
    byte_level,
    metaspace,
    pairs_of,
    plain_text,
    pursued,
    pursued_rows,
    tokens_of,
    transplant,
    write_model,
)
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders
from tokenizers.models import BPE, WordLevel
from transformers import AutoTokenizer

import raymerge
from raymerge.api import plan_for
from raymerge.device_numerics import torch_threads
from raymerge.errors import IncompleteError, NonFiniteError, OptionError, PlanError, RecipeError
from raymerge.events import Event, StageStarted, UnitDone
from raymerge.planner.inputs.sources import Source
from raymerge.planner.inputs.weights import Weights
from raymerge.stages import transplant as stage
from raymerge.stages.transplant import combined, matching_pursuit

K = 12


@pytest.fixture(scope="module")
def byte_tokens() -> Tokenizer:
    return byte_level(420, plain_text("english"))


@pytest.fixture(scope="module")
def space_tokens() -> Tokenizer:
    return metaspace(460, plain_text("code"))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory, byte_tokens: Tokenizer) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "base", byte_tokens, BYTE_LEVEL, seed=1)


@pytest.fixture(scope="module")
def donor(tmp_path_factory: pytest.TempPathFactory, space_tokens: Tokenizer) -> Path:
    root = tmp_path_factory.mktemp("models") / "donor"
    return write_model(root, space_tokens, METASPACE, seed=2, hidden=48)


def _made(base: Path, donor: Path) -> list[int]:
    """The donor's ids whose rows are approximated: neither shared nor single bytes."""
    known = {number for number, _ in pairs_of(base, donor)}
    texts = tokens_of(donor)
    return [
        n for n in sorted(texts.keys() - known) if not re.fullmatch("<0x..>", texts[n]) and len(texts[n]) > 1
    ]


def _problems(recipe: Any) -> str:
    with pytest.raises((PlanError, RecipeError)) as caught:
        raymerge.plan(recipe).require()
    return "\n".join(map(str, caught.value.problems))


@pytest.mark.parametrize("k", [1, 7, 24])
def test_a_pursuit_is_that_of_the_paper(k: int) -> None:
    """Also where more atoms are asked for than the rows are wide: the last ones count for nothing."""
    generator = np.random.default_rng(k)
    atoms = generator.normal(size=(60, 20)).astype(np.float32)
    targets, own = generator.normal(size=(9, 20)), generator.normal(size=(60, 6)).astype(np.float32)
    # A target that is an atom, and one that is nothing.
    targets[3], targets[4] = 2 * atoms[5], 0
    chosen, found, left = matching_pursuit(torch.from_numpy(atoms), torch.from_numpy(targets), k)
    made = combined(torch.from_numpy(own), chosen, found).numpy()
    for target, row, rest in zip(targets, made, left.tolist(), strict=True):
        order, expected = pursued(atoms.astype(np.float64), target, min(k, 20))
        np.testing.assert_allclose(row, expected @ own[order], rtol=1e-6, atol=1e-9)
        missed = np.linalg.norm(target - atoms[order].T @ expected)
        assert missed == pytest.approx(rest * np.linalg.norm(target), abs=1e-9)
    assert not found[:, 20:].any()


@pytest.mark.sample(2)
@pytest.mark.parametrize("base_tied", [False, True])
@pytest.mark.parametrize("donor_tied", [False, True])
def test_rows_are_shared_ones_combined_as_in_the_donor(
    tmp_path: Path, byte_tokens: Tokenizer, space_tokens: Tokenizer, *, base_tied: bool, donor_tied: bool
) -> None:
    """An untied head by the donor's head; a tied pair is made once."""
    base = write_model(tmp_path / "base", byte_tokens, BYTE_LEVEL, seed=1, tie=base_tied)
    donor = write_model(tmp_path / "donor", space_tokens, METASPACE, seed=2, hidden=48, tie=donor_tied)
    out = transplant(base, donor, tmp_path / "out", k=K)
    found, own, theirs = read_tensors(out), read_tensors(base), read_tensors(donor)
    pairs, ids = pairs_of(base, donor), _made(base, donor)
    assert len(ids) > 50
    for name in (EMBEDDING,) if base_tied else (EMBEDDING, HEAD):
        rows = found[name].double().numpy()
        for number, row in pairs:
            assert torch.equal(found[name][number], own[name][row])
        donor_rows = theirs[EMBEDDING if donor_tied else name].double().numpy()
        expected = pursued_rows(own[name].double().numpy(), donor_rows, pairs, ids, K)
        lengths = np.linalg.norm(expected, axis=1)
        assert (np.linalg.norm(rows[ids] - expected, axis=1) < 1e-4 * lengths).all()
    assert found.keys() == own.keys()
    assert all(torch.equal(found[name], own[name]) for name in own.keys() - {EMBEDDING, HEAD})
    assert json.loads((out / "config.json").read_text())["tie_word_embeddings"] is base_tied


def test_bytes_have_the_rows_of_the_same_bytes(base: Path, donor: Path, tmp_path: Path) -> None:
    """``<0x0A>`` here is ``Ċ`` there."""
    found, own = read_tensors(transplant(base, donor, tmp_path / "out", "mean")), read_tensors(base)
    mine = Tokenizer.from_file(str(base / "tokenizer.json")).get_vocab()
    theirs = Tokenizer.from_file(str(donor / "tokenizer.json")).get_vocab()
    for here, there in (("Ċ", "<0x0A>"), ("A", "<0x41>"), ("Ã", "<0xC3>")):
        assert torch.equal(found[EMBEDDING][theirs[there]], own[EMBEDDING][mine[here]])
    back = read_tensors(transplant(donor, base, tmp_path / "back", "mean"))
    assert torch.equal(back[EMBEDDING][mine["Ċ"]], read_tensors(donor)[EMBEDDING][theirs["<0x0A>"]])


def test_means_are_of_all_tokens_and_subwords_of_the_own_pieces(
    base: Path, donor: Path, tmp_path: Path
) -> None:
    own, ids, texts = read_tensors(base), _made(base, donor), tokens_of(donor)
    mean = read_tensors(transplant(base, donor, tmp_path / "mean", "mean"))
    for name in (EMBEDDING, HEAD):
        torch.testing.assert_close(mean[name][ids], own[name].double().mean(0).float().expand(len(ids), -1))
    subword = read_tensors(transplant(base, donor, tmp_path / "subword", "subword"))
    tokenizer = Tokenizer.from_file(str(base / "tokenizer.json"))
    plain = [number for number in ids if re.fullmatch(" ?[a-z]+", texts[number])]
    assert len(plain) > 30
    for number in plain:
        pieces = tokenizer.encode(texts[number]).ids
        torch.testing.assert_close(subword[EMBEDDING][number], own[EMBEDDING][pieces].mean(0))


def test_a_tokenizer_alone_is_enough_but_for_omp(base: Path, donor: Path, tmp_path: Path) -> None:
    alone = tmp_path / "alone"
    shutil.copytree(donor, alone, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    for approximation in ("subword", "mean"):
        made = transplant(base, alone, tmp_path / approximation, approximation)
        whole = transplant(base, donor, tmp_path / f"{approximation}-whole", approximation)
        assert (made / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
        assert (made / "config.json").read_bytes() == (whole / "config.json").read_bytes()
    assert "holds no weights" in _problems(raymerge.transplantation(base, alone))


def test_pieces_of_a_metaspace_tokenizer_have_no_space_in_front(
    base: Path, donor: Path, tmp_path: Path
) -> None:
    found, own = read_tensors(transplant(donor, base, tmp_path / "out", "subword")), read_tensors(donor)
    theirs = {text: number for number, text in tokens_of(donor).items()}
    ids = {text: number for number, text in tokens_of(base).items()}
    text = next(text for text in ids if re.fullmatch("[a-z]{2}", text) and text not in theirs)
    pieces = [theirs[each] for each in text]
    torch.testing.assert_close(found[EMBEDDING][ids[text]], own[EMBEDDING][pieces].mean(0))


def test_a_token_spelled_none_is_no_unknown_token(tmp_path: Path) -> None:
    """Where the tokenizer has none, which its file says with null."""
    vocab = {"<|end|>": 0, "N": 1, "o": 2, "n": 3, "e": 4, "No": 5, "Non": 6, "None": 7}
    words = Tokenizer(BPE(vocab, [("N", "o"), ("No", "n"), ("Non", "e")]))
    words.decoder = decoders.ByteLevel()
    base = write_model(tmp_path / "base", words, {"eos_token": "<|end|>"}, seed=1)
    wanted = Tokenizer(WordLevel({"<|end|>": 0, "Nonen": 1}, unk_token="<|end|>"))
    donor = write_model(tmp_path / "donor", wanted, {"eos_token": "<|end|>"}, seed=2)
    found, own = (
        read_tensors(each)[EMBEDDING] for each in (transplant(base, donor, tmp_path / "out", "subword"), base)
    )
    torch.testing.assert_close(found[1], own[[7, 3]].mean(0))


def test_only_special_tokens_that_differ_are_told(tmp_path: Path, base: Path, donor: Path) -> None:
    other = write_model(tmp_path / "other", metaspace(420, plain_text("english")), METASPACE, seed=3)
    notes = {
        each: raymerge.plan(raymerge.transplantation(each, donor, "mean")).manifest["notes"]
        for each in (base, other)
    }
    assert any("eos_token is '</s>' as in" in note for note in notes[base])
    assert not any("also in the configs" in note for note in notes[other])


def test_a_donor_may_have_the_name_of_a_word(
    base: Path, donor: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the recipe that is kept in the output is read again."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(base, "small")
    expected = transplant(Path("small"), donor, tmp_path / "out", "mean") / "model.safetensors"
    for word in ("base", "union"):
        shutil.copytree(donor, word)
        out = transplant(Path("small"), Path(word), tmp_path / f"out-{word}", "mean")
        assert (out / "model.safetensors").read_bytes() == expected.read_bytes()
        assert raymerge.replay(out).problems == ()


def test_tokenizer_and_special_tokens_are_the_donors(
    tmp_path: Path, byte_tokens: Tokenizer, space_tokens: Tokenizer
) -> None:
    """Ids in configs follow the donor's roles, also where the base states none."""
    ids = {"bos_token_id": 7, "eos_token_id": 0, "pad_token_id": None}
    base = write_model(tmp_path / "base", space_tokens, METASPACE, seed=1, **ids)
    donor = write_model(tmp_path / "donor", byte_tokens, BYTE_LEVEL, seed=2)
    (donor / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    out = transplant(base, donor, tmp_path / "out", "subword")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (out / name).read_bytes() == (donor / name).read_bytes()
    config = json.loads((out / "config.json").read_text())
    assert (config["eos_token_id"], config["pad_token_id"]) == (0, 1)
    assert config["vocab_size"] == byte_tokens.get_vocab_size()
    generation = json.loads((out / "generation_config.json").read_text())
    assert (generation["eos_token_id"], generation["pad_token_id"]) == (0, 1)
    text = "What the donor's tokenizer splits,\n\n  comes back: déjà vu."
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text


def test_ids_without_rows_and_rows_without_ids(tmp_path: Path, byte_tokens: Tokenizer, base: Path) -> None:
    """A donor's padding is kept, and a token beyond its rows has a rule (mergekit#657)."""
    wide = write_model(tmp_path / "wide", byte_level(450, plain_text("code")), BYTE_LEVEL, seed=2, spare=14)
    found = read_tensors(transplant(base, wide, tmp_path / "one", k=4))
    assert found[EMBEDDING].shape[0] == 464
    torch.testing.assert_close(found[EMBEDDING][-1], found[EMBEDDING][:450].mean(0))
    more = Tokenizer.from_str(byte_tokens.to_str())
    more.add_special_tokens([AddedToken("<image>")])
    narrow = write_model(tmp_path / "narrow", more, BYTE_LEVEL, seed=3, spare=-3)
    recipe = raymerge.transplantation(base, narrow, k=4)
    assert any(
        "1 the mean of all rows, for they have none in" in note
        for note in raymerge.plan(recipe).manifest["notes"]
    )
    rows, own = read_tensors(transplant(base, narrow, tmp_path / "two", k=4)), read_tensors(base)
    torch.testing.assert_close(rows[HEAD][-1], own[HEAD].double().mean(0).float())
    assert torch.equal(rows[HEAD][:-1], own[HEAD])
    # The base's tokens beyond its rows are approximated as if it did not have them.
    short = write_model(tmp_path / "short", byte_tokens, BYTE_LEVEL, seed=4, spare=-2)
    pairs = [(number, number) for number in range(byte_tokens.get_vocab_size() - 2)]
    last = [len(pairs), len(pairs) + 1]
    found, mine, theirs = (
        read_tensors(each)[EMBEDDING].double().numpy()
        for each in (transplant(short, base, tmp_path / "three", k=4), short, base)
    )
    np.testing.assert_allclose(found[last], pursued_rows(mine, theirs, pairs, last, 4), rtol=1e-4, atol=1e-6)


def test_shared_tokens_without_a_row_count_for_nothing(
    tmp_path: Path, base: Path, byte_tokens: Tokenizer, space_tokens: Tokenizer
) -> None:
    """A token that the base has too lies beyond the donor's rows, and the end of a text beyond the base's."""
    more = Tokenizer.from_str(space_tokens.to_str())
    more.add_special_tokens([AddedToken("<|pad|>")])
    donor = write_model(tmp_path / "donor", more, METASPACE, seed=2, hidden=48, spare=-1)
    found, own, theirs = (
        read_tensors(each)[EMBEDDING].double().numpy()
        for each in (transplant(base, donor, tmp_path / "out", k=K), base, donor)
    )
    pairs, ids = pairs_of(base, donor), _made(base, donor)
    assert pairs.pop() == (len(theirs), 1)
    np.testing.assert_allclose(found[ids], pursued_rows(own, theirs, pairs, ids, K), rtol=1e-4, atol=1e-6)
    assert (found[-1] == own[1]).all()
    longer = Tokenizer.from_str(byte_tokens.to_str())
    longer.add_special_tokens([AddedToken("<end>")])
    endless = write_model(tmp_path / "endless", longer, {"eos_token": "<end>"}, seed=1, spare=-1)
    rows = read_tensors(transplant(endless, donor, tmp_path / "mean", "mean"))
    torch.testing.assert_close(rows[HEAD][2], read_tensors(endless)[HEAD].double().mean(0).float())


def test_other_tensors_with_a_row_for_each_token_are_refused(tmp_path: Path, base: Path, donor: Path) -> None:
    tensors = read_tensors(base)
    tensors["lm_head.bias"] = torch.zeros(len(tensors[HEAD]))
    root = tmp_path / "biased"
    shutil.copytree(base, root)
    save_file(tensors, root / "model.safetensors", metadata={"format": "pt"})
    found = _problems(raymerge.transplantation(root, donor, k=K))
    assert "only embedding and head get new rows: lm_head.bias" in found


def test_the_command_shows_the_plan_and_what_it_made(tmp_path: Path, base: Path, donor: Path) -> None:
    words = ("transplant", str(base), "--tokenizer", str(donor), "-o", "out", "--k", str(K), "--inline")
    shown = run_command(*words, "--dry-run", cwd=tmp_path)
    assert shown.code == 0
    for each in (
        "made_rows_of",
        f"rows made by omp (k = {K})",
        "those of the same roles",
        "of the same bytes",
    ):
        assert each in shown.text
    assert list(tmp_path.iterdir()) == []
    made = run_command(*words, cwd=tmp_path)
    assert made.code == 0
    assert "what is combined misses the donor's rows by" in made.text
    run_command(*words[:-3], "--k", "9999", "--inline", cwd=tmp_path).check_refusal(
        "--k: a row is to be made of"
    )


@pytest.mark.parametrize("approximation", ["omp", "subword", "mean"])
def test_reading_takes_no_memory_of_the_size_of_a_matrix(
    tmp_path: Path,
    byte_tokens: Tokenizer,
    space_tokens: Tokenizer,
    approximation: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Beside the rows that are kept, where these are many times those that are read at once."""
    monkeypatch.setattr(stage, "_ROWS_AT_ONCE", 16)
    monkeypatch.setattr(stage, "BATCH", 4)
    wide = {"hidden": 4096, "num_hidden_layers": 0}
    base = write_model(tmp_path / "base", byte_tokens, BYTE_LEVEL, seed=1, **wide)
    donor = write_model(tmp_path / "donor", space_tokens, METASPACE, seed=2, **wide)
    peak, least = _peak_and_budget(base, donor, tmp_path, approximation, k=1)
    assert peak < least


@pytest.mark.slow
@pytest.mark.parametrize("approximation", ["omp", "subword", "mean"])
def test_a_unit_keeps_to_the_memory_that_is_stated(tmp_path: Path, approximation: str) -> None:
    base = write_model(
        tmp_path / "base", byte_level(2000, plain_text("english")), BYTE_LEVEL, seed=1, hidden=512
    )
    donor = write_model(
        tmp_path / "donor", metaspace(2000, plain_text("code")), METASPACE, seed=2, hidden=768
    )
    peak, least = _peak_and_budget(base, donor, tmp_path, approximation, k=16)
    assert peak < least


def _peak_and_budget(base: Path, donor: Path, root: Path, approximation: str, *, k: int) -> tuple[int, int]:
    """Bytes that a unit takes when its imports are done, and those that it states without its slack."""
    recipe = raymerge.transplantation(base, donor, approximation, k=k if approximation == "omp" else None)
    (planned,) = plan_for(recipe, root / "out")
    peaks = []
    for folder in ("warm", "measured"):
        work = stage.transplant_work(planned.stages[0])
        (root / folder).mkdir()
        with torch_threads(1), AllocationMeter() as meter:
            work.unit(0, staging=root / folder, device=torch.device("cpu"), budget=0, tell=lambda _: None)
        peaks.append(meter.peak_bytes)
    return peaks[1], work.least_budget() - 128 * 2**20


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("approximation", ["omp", "subword", "mean"])
def test_no_row_is_made_of_what_is_not_finite(
    base: Path, donor: Path, tmp_path: Path, approximation: str, value: float
) -> None:
    """A byte's row, which all ways read."""
    tensors = read_tensors(base)
    tensors[EMBEDDING][min(row for row, text in tokens_of(base).items() if text == "a"), 5] = value
    broken = tmp_path / "broken"
    shutil.copytree(base, broken)
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(NonFiniteError, match="no row can be made of them"):
        transplant(broken, donor, tmp_path / "out", approximation, k=K if approximation == "omp" else None)


@pytest.mark.parametrize("approximation", ["omp", "subword", "mean"])
def test_headers_are_read_once_for_a_unit_and_files_closed(
    base: Path, donor: Path, tmp_path: Path, approximation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the mean of all rows, which only some rows are, is read where it is needed."""
    monkeypatch.setattr(stage, "BATCH", 4)
    opened: list[str] = []
    closed: list[str] = []

    class Counted(Weights):
        def __init__(self, source: Source) -> None:
            super().__init__(source)
            opened.append(self._source.name)

        def close(self) -> None:
            super().close()
            closed.append(self._source.name)

    monkeypatch.setattr(stage, "Weights", Counted)
    means: list[int] = []
    mean = stage._Reader.mean
    monkeypatch.setattr(stage._Reader, "mean", lambda reader: means.append(1) or mean(reader))
    recipe = raymerge.transplantation(base, donor, approximation, k=K if approximation == "omp" else None)
    (planned,) = plan_for(recipe, tmp_path / "out")
    work = stage.transplant_work(planned.stages[0])
    work.unit(0, staging=tmp_path, device=torch.device("cpu"), budget=0, tell=lambda _: None)
    assert sorted(opened) == sorted(closed)
    assert len(opened) == (2 if approximation == "omp" else 1)
    assert len(means) == (1 if approximation == "mean" else 0)


def test_other_dtypes_and_a_second_stage_of_a_chain(base: Path, donor: Path, tmp_path: Path) -> None:
    """A merge whose result gets the vocabulary, in one file; bfloat16 is rounded once."""
    merge = {
        "merge_method": "linear",
        "name": "mean",
        "models": [{"model": str(base), "parameters": {"weight": 1}}],
    }
    block = {"source": str(donor), "approximation": "omp", "k": K}
    last = {
        "merge_method": "passthrough",
        "models": [{"model": "mean"}],
        "tokenizer": block,
        "dtype": "bfloat16",
    }
    out = raymerge.submit([merge, last], tmp_path / "out", INLINE).output
    exact = read_tensors(transplant(base, donor, tmp_path / "exact", k=K))
    found = read_tensors(Path(out))
    assert torch.equal(found[EMBEDDING], exact[EMBEDDING].bfloat16())


def test_blocks_and_resuming_change_no_byte(
    base: Path, donor: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage, "BLOCK", 64)
    options, log = raymerge.RunOptions(inline=True), EventLog(_stop_after(3))
    recipe = raymerge.transplantation(base, donor, k=K)
    with pytest.raises(IncompleteError):
        raymerge.submit(recipe, tmp_path / "out", options, on_event=log)
    again = EventLog()
    raymerge.submit(recipe, tmp_path / "out", options, on_event=again)
    assert again.of(StageStarted)[0].done_units == 3
    whole = transplant(base, donor, tmp_path / "whole", k=K)
    assert digests(tmp_path / "out") == digests(whole)


_KILLED = """
import os, signal, sys
import raymerge
from raymerge.events import UnitDone
from raymerge.stages import transplant

transplant.BLOCK = 64
done = []

def look(event):
    if isinstance(event, UnitDone):
        done.append(event)
        if len(done) == 3:
            os.kill(os.getpid(), signal.SIGKILL)

recipe = raymerge.transplantation(sys.argv[1], sys.argv[2], k=12)
raymerge.submit(recipe, sys.argv[3], raymerge.RunOptions(inline=True), on_event=look)
"""


@pytest.mark.slow
def test_what_was_killed_goes_on(
    base: Path, donor: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [sys.executable, "-c", _KILLED, str(base), str(donor), str(tmp_path / "out")]
    assert subprocess.run(words, check=False).returncode == -signal.SIGKILL
    assert not (tmp_path / "out").exists()
    monkeypatch.setattr(stage, "BLOCK", 64)
    log = EventLog()
    raymerge.submit(raymerge.transplantation(base, donor, k=12), tmp_path / "out", INLINE, on_event=log)
    assert log.of(StageStarted)[0].done_units >= 2
    assert digests(tmp_path / "out") == digests(transplant(base, donor, tmp_path / "whole", k=12))


def _stop_after(count: int) -> Callable[[Event], None]:
    done: list[Event] = []

    def look(event: Event) -> None:
        if isinstance(event, UnitDone):
            done.append(event)
            if len(done) == count:
                signal.raise_signal(signal.SIGINT)

    return look


def test_a_row_that_was_changed_is_found(base: Path, donor: Path, tmp_path: Path) -> None:
    """With the stage's result kept an audit computes with it; without, digests tell all the same."""
    out = transplant(base, donor, tmp_path / "out", k=K, keep_intermediates=True)
    verdict = raymerge.audit(out, raymerge.AuditOptions(sample=1), INLINE)
    assert (verdict.num_problems, verdict.skipped) == (0, ())
    assert raymerge.replay(out).problems == ()
    lean = transplant(base, donor, tmp_path / "lean", k=K)
    for root in (out, lean):
        # Tensors lie in the order of their names, the head first.
        flip(root / "model.safetensors", -10_000)
        assert raymerge.audit(root, raymerge.AuditOptions(sample=1), INLINE).num_problems


@pytest.mark.slow
def test_two_workers_make_the_same_bytes(base: Path, donor: Path, tmp_path: Path) -> None:
    recipe = raymerge.transplantation(base, donor, k=K)
    raymerge.submit(recipe, tmp_path / "two", raymerge.RunOptions(workers=2, device="cpu"))
    assert digests(tmp_path / "two") == digests(transplant(base, donor, tmp_path / "one", k=K))


def _without(root: Path, pattern: str) -> None:
    for path in root.glob(pattern):
        path.unlink()


def _other_words(root: Path) -> None:
    words = Tokenizer(WordLevel({"none": 0, "such": 1}, unk_token="none"))
    write_model(root, words, {"unk_token": "none"}, seed=4)


def _in_codes(root: Path) -> None:
    tensors = read_tensors(root)
    tensors[EMBEDDING] = tensors[EMBEDDING].to(torch.float8_e4m3fn)
    save_file(tensors, root / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("harm", "k", "problem"),
    [
        (lambda root: _without(root, "tokenizer*"), K, "it has no tokenizer files"),
        (lambda root: _without(root, "*.safetensors"), K, "holds no weights"),
        (_other_words, K, "have no token in common"),
        (_in_codes, K, "is stored as F8_E4M3 codes, and rows are made from plain numbers"),
        (lambda _: None, 4000, "a row is to be made of 4000 shared tokens, and .* share [0-9]+"),
    ],
)
def test_donors_that_cannot_be_taken_are_refused(
    tmp_path: Path, base: Path, space_tokens: Tokenizer, harm: Callable[[Path], None], k: int, problem: str
) -> None:
    donor = write_model(tmp_path / "donor", space_tokens, METASPACE, seed=2)
    harm(donor)
    assert re.search(problem, _problems(raymerge.transplantation(base, donor, k=k)))


@pytest.mark.parametrize("approximation", ["omp", "subword", "mean"])
def test_adapters_are_refused_on_both_sides(
    tmp_path: Path, base: Path, donor: Path, approximation: str
) -> None:
    """Also where only the tokenizer is taken: an adapter can bring another."""
    names = [f"{PREFIX}model.layers.0.self_attn.q_proj.lora_{side}.weight" for side in "AB"]
    for model, width in ((base, 32), (donor, 48)):
        sizes = dict(zip(names, ((4, width), (width, 4)), strict=True))
        write_adapter(
            tmp_path / model.name,
            {name: torch.ones(size) for name, size in sizes.items()},
            lora_config(target_modules=["q_proj"]),
        )
    for pair in ((f"{base}+{tmp_path / 'base'}", donor), (base, f"{donor}+{tmp_path / 'donor'}")):
        found = _problems(raymerge.transplantation(*pair, approximation))
        assert "rows and tokenizers are taken from stored ones" in found


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"k": 0}, "0 is out of range"),
        ({"approximation": "mean", "k": 3}, "'k' is the number of tokens that omp makes a row of"),
        ({"approximation": "nearest"}, "'nearest' is not known here"),
        ({"source": "union"}, "'approximation' makes rows for the tokens of another model"),
        ({"tokens": {"a": {}}}, "'tokens' chooses rows by token"),
    ],
)
def test_recipes_that_mean_nothing_are_refused(
    base: Path, donor: Path, changes: dict[str, Any], problem: str
) -> None:
    block = {"source": str(donor), "approximation": "omp", **changes}
    recipe = {"merge_method": "passthrough", "models": [{"model": str(base)}], "tokenizer": block}
    assert problem in _problems(recipe)


def test_rows_are_made_for_one_model(tmp_path: Path, base: Path, donor: Path) -> None:
    block = {"source": str(donor), "approximation": "omp", "k": K}
    models = [{"model": str(each), "parameters": {"weight": 1}} for each in (base, donor)]
    assert "merges 2" in _problems({"merge_method": "linear", "models": models, "tokenizer": block})
    small = raymerge.RunOptions(inline=True, memory=32 << 20)
    with pytest.raises(OptionError, match="rows for"):
        raymerge.submit(raymerge.transplantation(base, donor, k=K), tmp_path / "out", small)
    assert list(tmp_path.iterdir()) == []
