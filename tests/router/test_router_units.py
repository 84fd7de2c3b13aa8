"""Units of work of a router's stage: prompts, readings and parts."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kits.gate_stages import CPU, LAYERS, reading_base, stage_of, three_experts
from kits.layer_streams import KINDS, make_base, open_base
from kits.model_parents import save
from kits.plan_maker import llama
from kits.tokenizer_maker import CHATML_CONFIG, bpe, word_level, write_tokenizer
from torch import nn

from raymerge.device_numerics import torch_threads
from raymerge.errors import IncompleteError, PlanError
from raymerge.planner.inputs.sources import ExpertPrompts, GateSpec, Source, Stage
from raymerge.planner.inputs.weights import Weights
from raymerge.stages.router.prompts import (
    FEWEST_TOKENS,
    MOST_TOKENS,
    UNIT_TOKENS,
    Reading,
    Schedule,
    TokenRun,
    make_schedule,
    tokenized,
)
from raymerge.stages.router.work import PROMPTS, gate_work
from raymerge.stages.streamed_model import (
    Call,
    ParameterFinder,
    Shape,
    StreamedModel,
    are_alike,
    compute_buffers,
    is_chain,
    keep_states,
    recorded,
    state_of,
    tensors_of,
)

SEVERAL = 20
"""Tokens of a unit, where a stage is to have several."""
MIB = 1 << 20


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Source:
    return reading_base(tmp_path_factory.mktemp("models") / "base")


def _work(base: Source, mode: str) -> Any:
    return gate_work(stage_of(base, mode, three_experts()))


@pytest.mark.parametrize("mode", ["hidden", "ridge", "cheap_embed", "random"])
def test_it_tells_after_each_layer_what_it_has_read(tmp_path: Path, base: Source, mode: str) -> None:
    work, told = _work(base, mode), list[int]()
    with torch_threads(1):
        read, _ = work.unit(0, staging=tmp_path, device=CPU, budget=1 << 30, tell=told.append)
    assert len(told) == LAYERS
    assert told == sorted(told)
    assert told[-1] == read
    if mode in ("hidden", "ridge"):
        assert 0 < told[0] < told[1] < told[2]


@pytest.mark.parametrize("mode", ["hidden", "random"])
def test_it_ends_when_it_is_told_to(tmp_path: Path, base: Source, mode: str) -> None:
    calls: list[int] = []

    def stop(nbytes: int) -> None:
        calls.append(nbytes)
        raise IncompleteError("stopped at once.")

    with pytest.raises(IncompleteError):
        _work(base, mode).unit(0, staging=tmp_path, device=CPU, budget=1 << 30, tell=stop)
    assert len(calls) == 1
    assert not list(tmp_path.glob("spill*"))


@pytest.mark.parametrize("unit_tokens", [SEVERAL, 1 << 16])
@pytest.mark.parametrize("mode", ["ridge", "cheap_embed"])
def test_each_unit_leaves_its_own_whole_files(
    tmp_path: Path, base: Source, monkeypatch: pytest.MonkeyPatch, *, mode: str, unit_tokens: int
) -> None:
    monkeypatch.setattr("raymerge.stages.router.prompts.UNIT_TOKENS", unit_tokens)
    work = _work(base, mode)
    seen: set[str] = set()
    for number in range(work.num_units):
        with torch_threads(1):
            work.unit(number, staging=tmp_path, device=CPU, budget=1 << 30, tell=lambda _: None)
        left = work.files(number)
        assert set(left.values()) == {()}
        assert not seen & set(left)
        seen |= set(left)
        assert {path.name for path in tmp_path.iterdir()} == seen
    assert (work.num_units > 2) == (mode == "ridge" and unit_tokens == SEVERAL)
    before = {name: (tmp_path / name).read_bytes() for name in seen}
    with torch_threads(1):
        work.conclude(tmp_path)
    assert before == {name: (tmp_path / name).read_bytes() for name in seen}


def test_files_of_attempts_that_were_killed_are_cleared_away(tmp_path: Path, base: Source) -> None:
    work = _work(base, "hidden")
    ours, other = tmp_path / "spill-0-killed", tmp_path / "spill-10-working"
    for place in (ours, other):
        place.mkdir()
        (place / "hidden_states.bin").write_bytes(b"states")
    seen: list[list[str]] = []

    def look(_: int) -> None:
        seen.append(sorted(path.name for path in tmp_path.glob("spill-*")))

    with torch_threads(1):
        work.unit(0, staging=tmp_path, device=CPU, budget=0, tell=look)
    assert not ours.exists()
    assert other.exists(), "another unit's"
    assert all(len(names) == 2 and names[0].startswith("spill-0-") for names in seen)
    assert [path.name for path in tmp_path.glob("spill-*")] == [other.name]


def test_an_attempt_that_was_given_up_does_no_harm(tmp_path: Path, base: Source) -> None:
    """It goes on after the next one began, with a file of its own that has no name any more."""
    (tmp_path / "plain").mkdir()
    (tmp_path / "staging").mkdir()
    once: list[int] = []

    def begin_again(nbytes: int) -> None:
        if not once:
            once.append(nbytes)
            _work(base, "ridge").unit(0, staging=tmp_path / "staging", device=CPU, budget=0, tell=_silent)

    with torch_threads(1):
        _work(base, "ridge").unit(0, staging=tmp_path / "plain", device=CPU, budget=0, tell=_silent)
        _work(base, "ridge").unit(0, staging=tmp_path / "staging", device=CPU, budget=0, tell=begin_again)
    found, wanted = (_bytes(tmp_path / name) for name in ("staging", "plain"))
    assert found == wanted


def _silent(_: int) -> None:
    """Nobody listens."""


def _bytes(root: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in root.iterdir()}


def test_base_and_prompts_are_looked_at_once(
    tmp_path: Path, base: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    models: list[StreamedModel] = []
    readings: list[Stage] = []
    build, read = StreamedModel.__init__, tokenized

    def built(self: StreamedModel, *args: Any) -> None:
        models.append(self)
        build(self, *args)

    def counted(spec: Any) -> Any:
        readings.append(spec)
        return read(spec)

    monkeypatch.setattr(StreamedModel, "__init__", built)
    monkeypatch.setattr("raymerge.stages.router.work.tokenized", counted)
    for mode, num_models in (("ridge", 1), ("cheap_embed", 0)):
        models.clear()
        readings.clear()
        work = _work(base, mode)
        size = len(pickle.dumps(work))
        work.check()
        budget = work.least_budget()
        assert work.num_units == len(work.costs())
        with torch_threads(1):
            work.unit(0, staging=tmp_path, device=CPU, budget=budget, tell=_silent)
            work.conclude(tmp_path)
        assert (len(models), len(readings)) == (num_models, 1)
        assert len(pickle.dumps(work)) == size, "workers find out for themselves"
        assert pickle.loads(pickle.dumps(work)).least_budget() == budget


SCRIPT = """
import json, sys
from pathlib import Path
import torch
from kits.gate_stages import CPU, reading_base, stage_of, three_experts
from raymerge.device_numerics import return_free_memory
from raymerge.stages.router.work import gate_work
from raymerge.stages.router import prompts as readings

def status(word):
    lines = open("/proc/self/status").read().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(word))

def grown(act):
    return_free_memory()
    before = status("VmRSS")
    open("/proc/self/clear_refs", "w").write("5")
    act()
    return status("VmHWM") - before

def silent(_):
    pass

torch.set_num_threads(1)
readings.UNIT_TOKENS = int(sys.argv[2])
found = []
for width in (32, 1024):
    # The first is to have everything imported.
    root = Path(sys.argv[1]) / str(width)
    base = reading_base(root / "base", layers=1, width=width)
    work = gate_work(stage_of(base, "ridge", three_experts(), layers=(0,), width=width))
    work.check()
    least = work.least_budget()
    units = [
        grown(lambda: work.unit(number, staging=root, device=CPU, budget=least, tell=silent))
        for number in range(work.num_units)
    ]
    found = [least, max(units), grown(lambda: work.conclude(root)), work._own_nbytes()]
print(json.dumps(found))
"""


@pytest.mark.slow
@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="the peak cannot be reset here")
@pytest.mark.parametrize("unit_tokens", [SEVERAL, 1 << 16])
def test_neither_units_nor_the_conclusion_take_more_than_is_said(tmp_path: Path, unit_tokens: int) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path), str(unit_tokens)],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
        capture_output=True,
        text=True,
        check=True,
    )
    least, unit, conclusion, sums = json.loads(ran.stdout.splitlines()[-1])
    assert unit <= least + 4 * MIB
    assert conclusion <= sums + 4 * MIB
    assert sums < least < 3 * sums


WORDS = ["<unk>", "<s>", "</s>", *"abcdefghij"]
BEGIN = WORDS.index("<s>")
IDS = {word: number for number, word in enumerate(WORDS)}


def speaking_base(root: Path, tokenizer_config: Mapping[str, Any] = CHATML_CONFIG, **config: Any) -> Source:
    """A model whose tokenizer knows a few words, and ``<s>`` and ``</s>``."""
    llama(root, 1, **config)
    tokenizer = word_level(WORDS, added=["<s>", "</s>"])
    write_tokenizer(root, tokenizer, {**tokenizer_config, "unk_token": "<unk>"})
    return open_base(root)


def spec_of(base: Source, *experts: ExpertPrompts, shared: tuple[ExpertPrompts, ...] = ()) -> GateSpec:
    """Router rows of one layer for these experts."""
    return GateSpec(base, "hidden", experts, shared, (0,), 32, 0, 1.0, 0.1, ())


def ids(text: str) -> tuple[int, ...]:
    """Words with blanks between them as the base's tokenizer knows them."""
    return tuple(IDS[word] for word in text.split())


def refused(spec: GateSpec) -> list[str]:
    with pytest.raises(PlanError) as caught:
        tokenized(spec)
    assert all(problem.remedy for problem in caught.value.problems)
    return [str(problem) for problem in caught.value.problems]


@pytest.fixture(scope="module")
def long_base(tmp_path_factory: pytest.TempPathFactory) -> Source:
    return speaking_base(tmp_path_factory.mktemp("prompts") / "base", max_position_embeddings=2048)


def test_each_expert_in_turn_and_shared_ones_last(long_base: Source) -> None:
    first = ExpertPrompts("expert 0", ("a b", "c"), ("d",), text="e f", held_out=("g h i",))
    second = ExpertPrompts("expert 1", ("j",))
    shared = ExpertPrompts("shared expert", ("a",), ("b",))
    assert tokenized(spec_of(long_base, first, second, shared=(shared,))) == (
        TokenRun(0, 1, ids("<s> a b")),
        TokenRun(0, 1, ids("<s> c")),
        TokenRun(0, 1, ids("<s> e f")),
        TokenRun(0, -1, ids("<s> d")),
        TokenRun(0, 0, ids("<s> g h i")),
        TokenRun(1, 1, ids("<s> j")),
        TokenRun(2, 1, ids("<s> a")),
        TokenRun(2, -1, ids("<s> b")),
    )


def test_without_a_beginning_the_prompt_alone(tmp_path: Path) -> None:
    fast = {"tokenizer_class": "PreTrainedTokenizerFast"}
    long_base = speaking_base(tmp_path / "base", fast, max_position_embeddings=2048)
    runs = tokenized(spec_of(long_base, ExpertPrompts("e", ("a b",), text="c " * 600)))
    assert runs[0].tokens == ids("a b")
    assert [len(run.tokens) for run in runs[1:]] == [512, 88]


def test_an_empty_prompt_is_the_beginning_of_a_sequence(tmp_path: Path, long_base: Source) -> None:
    runs = tokenized(spec_of(long_base, ExpertPrompts("e", ("",), ("a", ""))))
    assert [(run.sign, run.tokens) for run in runs] == [(1, ids("<s>")), (-1, ids("<s> a")), (-1, ids("<s>"))]
    without = speaking_base(tmp_path / "base", {"tokenizer_class": "PreTrainedTokenizerFast"})
    (problem,) = refused(spec_of(without, ExpertPrompts("e", ("",))))
    assert problem == (
        f"e: the prompt '': gives no tokens in the tokenizer of {without.name}. "
        "Write a text, or remove the prompt."
    )


def test_the_tokenizer_adds_nothing_by_itself(tmp_path: Path) -> None:
    llama(tmp_path / "base", 1)
    tokenizer = bpe(["<s>", "</s>", "a", "b"], added=["<s>", "</s>"])
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [0], "tokens": ["<s>"]}},
    }
    write_tokenizer(tmp_path / "base", tokenizer, CHATML_CONFIG)
    long_base = open_base(tmp_path / "base")
    assert tokenized(spec_of(long_base, ExpertPrompts("e", ("ab",)))) == (TokenRun(0, 1, (0, 2, 3)),)


def test_special_tokens_in_a_prompt_are_read_as_such(long_base: Source) -> None:
    (run,) = tokenized(spec_of(long_base, ExpertPrompts("e", ("a</s>b",))))
    assert run.tokens == ids("<s> a </s> b")


@settings(deadline=None, max_examples=13)
@given(count=st.integers(1, 3 * MOST_TOKENS))
def test_files_are_cut_into_pieces(long_base: Source, count: int) -> None:
    words = [WORDS[3 + number % 10] for number in range(count)]
    runs = tokenized(spec_of(long_base, ExpertPrompts("e", text=" ".join(words))))
    own = MOST_TOKENS - 1
    assert all(run.tokens[0] == BEGIN and run.sign == 1 for run in runs)
    read = [token for run in runs for token in run.tokens[1:]]
    assert read == list(ids(" ".join(words)))[: len(read)]
    assert all(len(run.tokens) == MOST_TOKENS for run in runs[:-1])
    rest = count % own
    dropped = rest if count > own and 0 < rest < FEWEST_TOKENS else 0
    assert len(read) == count - dropped


def test_files_are_cut_to_what_the_model_reads_at_once(tmp_path: Path) -> None:
    long_base = speaking_base(tmp_path / "base", max_position_embeddings=40)
    runs = tokenized(spec_of(long_base, ExpertPrompts("e", text="a " * 100)))
    assert [len(run.tokens) for run in runs] == [40, 40, 23]


def test_no_limit_where_the_config_names_none(tmp_path: Path) -> None:
    root = tmp_path / "base"
    speaking_base(root)
    config = json.loads((root / "config.json").read_text())
    del config["max_position_embeddings"]
    (root / "config.json").write_text(json.dumps(config))
    long_base = open_base(root)
    (run,) = tokenized(spec_of(long_base, ExpertPrompts("e", ("a " * 3000,))))
    assert len(run.tokens) == 3001


def test_every_problem_at_once(tmp_path: Path) -> None:
    long_base = speaking_base(tmp_path / "base", max_position_embeddings=20)
    one = ExpertPrompts("expert 0 (code)", ("a " * 20 + "a", "b"), ("d",), held_out=("c " * 29 + "c",))
    two = ExpertPrompts("expert 1 (law)", ("a",), text=" ")
    found = refused(spec_of(long_base, one, two))
    assert found == [
        "expert 0 (code): the prompt 'a a a a a a a a a a a a a a a a a a a...': is 22 tokens long, and "
        f"{long_base.name} reads 20 at once. Shorten it; router_input, centroid and ridge take a "
        "prompt_file, which is cut into pieces.",
        "expert 0 (code): the prompt 'c c c c c c c c c c c c c c c c c c c...': is 31 tokens long, and "
        f"{long_base.name} reads 20 at once. Shorten it; router_input, centroid and ridge take a "
        "prompt_file, which is cut into pieces.",
        f"expert 1 (law): its prompt file: gives no tokens in the tokenizer of {long_base.name}. "
        "Name a file with text in it.",
    ]


def test_tokens_beyond_the_embedding(tmp_path: Path) -> None:
    long_base = speaking_base(tmp_path / "base")
    rows = long_base.checkpoint.tensors["model.embed_tokens.weight"].shape[0]
    words = [*WORDS, *(f"w{number}" for number in range(rows))]
    tokenizer = word_level(words, added=["<s>", "</s>"])
    write_tokenizer(tmp_path / "base", tokenizer, {**CHATML_CONFIG, "unk_token": "<unk>"})
    beyond = words[rows + 2]
    experts = ExpertPrompts("e", ("a",), text=beyond), ExpertPrompts("f", (beyond, words[rows - 1]))
    found = refused(spec_of(open_base(tmp_path / "base"), *experts))
    assert len(found) == 2
    assert all(f"has the token {rows + 2}, and the embedding of" in each for each in found)


def test_a_base_without_a_tokenizer(tmp_path: Path) -> None:
    llama(tmp_path / "base", 1)
    (found,) = refused(spec_of(open_base(tmp_path / "base"), ExpertPrompts("e", ("a",))))
    assert "tokenizer" in found
    assert "Put the tokenizer's files beside its config.json, or use gate_mode: random." in found


def test_a_tokenizer_that_comes_as_code_is_not_run(tmp_path: Path) -> None:
    root = llama(tmp_path / "base", 1, model_type="nimbus")
    own = {"tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": ["own.OwnTokenizer", None]}}
    (root / "tokenizer_config.json").write_text(json.dumps(own))
    (root / "own.py").write_text("raise SystemExit('this was run')\n")
    (found,) = refused(spec_of(open_base(root), ExpertPrompts("e", ("a",))))
    assert "transformers cannot load its tokenizer" in found


ROUTED = 3

runs_of = st.lists(
    st.builds(
        TokenRun,
        expert=st.integers(0, ROUTED),
        sign=st.sampled_from((-1, 0, 1)),
        tokens=st.lists(st.integers(0, 2), min_size=1, max_size=5).map(tuple),
    ),
    max_size=12,
)


def readings(schedule: Schedule) -> list[Reading]:
    return [reading for unit in schedule.units for reading in unit]


def planned(runs: list[TokenRun], mode: str = "hidden", *, routed: int = ROUTED, shared: int = 1) -> Schedule:
    return make_schedule(runs, mode, num_routed=routed, num_shared=shared)


@settings(deadline=None, max_examples=50)
@given(runs_of)
def test_equal_runs_are_read_once_and_count_as_often_as_they_are_given(runs: list[TokenRun]) -> None:
    found = readings(planned(runs))
    assert len({each.run.tokens for each in found}) == len(found)
    counted = Counter((use.expert, use.sign, each.run.tokens) for each in found for use in each.uses)
    assert counted == Counter((run.expert, run.sign, run.tokens) for run in runs if run.sign)


@settings(deadline=None, max_examples=50)
@given(runs_of)
def test_modes_of_positive_texts_read_no_others(runs: list[TokenRun]) -> None:
    schedule = planned(runs, "ridge")
    assert all(sign == 1 for each in readings(schedule) for _, sign, _ in each.uses)
    assert all(each.uses or each.kept for each in readings(schedule))
    tokens = [sum(len(run.tokens) for run in runs if run.sign > 0 and run.expert == e) for e in range(4)]
    assert list(schedule.num_tokens) == tokens


@settings(deadline=None, max_examples=50)
@given(runs_of)
def test_short_texts_are_judged_whole_by_held_out_ones_where_there_are_any(runs: list[TokenRun]) -> None:
    schedule = planned(runs)
    for expert in range(ROUTED):
        own = [run for run in runs if run.expert == expert]
        held_out = [run.tokens for run in own if run.sign == 0]
        wanted = held_out or [run.tokens for run in own if run.sign > 0]
        assert (expert in schedule.on_own) == (not held_out)
        assert schedule.num_kept[expert] == sum(map(len, wanted))
        kept = [
            (each.run.tokens, positions)
            for each in readings(schedule)
            for whose, positions in each.kept
            if whose == expert
        ]
        assert Counter(tokens for tokens, _ in kept) == Counter(wanted)
        assert all(positions == tuple(range(len(tokens))) for tokens, positions in kept)


@settings(deadline=None, max_examples=25)
@given(st.lists(st.integers(1, 400), min_size=1, max_size=8), st.integers(1, 80))
def test_long_texts_are_judged_by_tokens_evenly_taken(lengths: list[int], routed: int) -> None:
    runs = [TokenRun(0, 1, (number,) * length) for number, length in enumerate(lengths)]
    schedule = planned(runs, routed=routed, shared=0)
    total = sum(lengths)
    wanted = min(total, 256, 8192 // routed)
    assert schedule.num_kept[0] == wanted
    places, begin = [], 0
    for each in readings(schedule):
        for _, positions in each.kept:
            places += [begin + position for position in positions]
        begin += len(each.run.tokens)
    assert len(set(places)) == wanted
    steps = [after - before for before, after in pairwise(places)]
    assert all(total // wanted <= step <= -(-total // wanted) for step in steps)


def test_units_are_whole_runs_in_order() -> None:
    lengths = (30_000, 30_000, 10_000, UNIT_TOKENS + 1, 5, 5)
    runs = [TokenRun(0, 1, (number,) * length) for number, length in enumerate(lengths)]
    schedule = planned(runs)
    assert [[len(each.run.tokens) for each in unit] for unit in schedule.units] == [
        [30_000, 30_000],
        [10_000],
        [UNIT_TOKENS + 1],
        [5, 5],
    ]
    assert schedule.longest == UNIT_TOKENS + 1
    assert schedule.num_positive == (6, 0, 0, 0)


@settings(deadline=None, max_examples=50)
@given(runs_of)
def test_halves_share_no_text_unless_it_is_all_there_is(runs: list[TokenRun]) -> None:
    schedule = planned(runs, "ridge")
    for expert in range(ROUTED + 1):
        own = [
            (reading.run.tokens, use.first)
            for reading in readings(schedule)
            for use in reading.uses
            if use.expert == expert
        ]
        counts = Counter(tokens for tokens, _ in own)
        assert sum(first for _, first in own) == schedule.num_first[expert]
        if len(counts) == 1:
            assert all(first == len(tokens) // 2 for tokens, first in own)
            continue
        assert all(first in (0, len(tokens)) for tokens, first in own)
        assert len(set(own)) == len(counts), "a text that is given twice is in one half"
        longest = max((len(tokens) * count for tokens, count in counts.items()), default=0)
        assert abs(2 * schedule.num_first[expert] - schedule.num_tokens[expert]) <= longest


def test_experts_with_the_same_texts_have_the_same_halves() -> None:
    texts = ((1, 2, 3), (4, 5), (6,), (7, 8, 9, 1))
    schedule = planned([TokenRun(expert, 1, text) for expert in (0, 1) for text in texts], "ridge")
    assert all(len({use.first for use in reading.uses}) == 1 for reading in readings(schedule))
    assert schedule.shares[:, 2].tolist() == [0.0, 1.0], "an expert without text divides by nothing"


def test_held_out_texts_of_shared_experts_are_not_read() -> None:
    schedule = planned([TokenRun(3, 1, (1,)), TokenRun(3, 0, (2,))])
    assert [each.run.tokens for each in readings(schedule)] == [(1,)]
    assert readings(schedule)[0].kept == ()


class MergeJob(nn.Module):
    """Two layers and what a model may do around them."""

    def __init__(self, kind: str = "states") -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.kind = kind

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        mask = torch.ones(3, 3)
        for layer in self.layers:
            match self.kind:
                case "states":
                    hidden = layer(hidden, mask, scale=2.0)
                case "tuple":
                    hidden = layer(hidden, mask, scale=2.0)[0]
                case "more":
                    hidden = layer(hidden) + 1
                case "shares":
                    hidden = layer(hidden, shared={})
        return hidden


def calls_of(kind: str, hidden: torch.Tensor, *, as_tuple: bool = False) -> tuple[Call, ...]:
    model = MergeJob(kind)
    found = recorded(lambda: model(hidden), list(model.layers), as_tuple=as_tuple)
    # The layers are themselves again.
    assert model.layers[0](torch.zeros(1, 4)).shape == (1, 4)
    return found


@pytest.mark.parametrize(("kind", "as_tuple"), [("states", True), ("tuple", False), ("more", False)])
def test_what_is_no_chain(kind: str, as_tuple: bool) -> None:
    try:
        calls = calls_of(kind, torch.randn(1, 3, 4), as_tuple=as_tuple)
    except TypeError:
        return
    assert not is_chain(calls, 2)


def test_a_mapping_that_layers_could_fill_is_not_plain() -> None:
    assert not calls_of("shares", torch.randn(1, 3, 4))[0].is_plain
    assert not Call(torch.ones(1), (object(),), {}, False).is_plain


def test_calls_are_compared_but_for_the_states() -> None:
    one, other = (calls_of("states", torch.randn(1, 3, 4)) for _ in range(2))
    assert are_alike(one, other)
    for args in ((torch.zeros(3, 3),), (None,), (torch.ones(2, 2),), (torch.ones(3, 3), 1)):
        changed = [Call(call.hidden, args, call.kwargs, False) for call in other]
        assert not are_alike(one, changed)


class Positions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("known", torch.zeros(3), persistent=False)
        self.register_buffer("unknown", torch.zeros(2, dtype=torch.int64), persistent=False)
        self.register_buffer("saved", torch.zeros(1))


def _init(module: nn.Module) -> None:
    if isinstance(module, Positions):
        module.get_buffer("known").copy_(torch.arange(3.0))


def test_unsaved_buffers_are_computed_and_others_are_left() -> None:
    with torch.device("meta"):
        part = nn.ModuleDict({"one": Positions(), "layers": Positions()})
    left = compute_buffers(SimpleNamespace(_init_weights=_init), part, but="layers", device=CPU)
    assert left == ["one.unknown"]
    assert part["one"].get_buffer("known").tolist() == [0.0, 1.0, 2.0]
    assert part["one"].get_buffer("saved").is_meta
    assert part["one"].get_parameter("weight").is_meta
    assert part["layers"].get_buffer("known").is_meta


def test_stacked_experts_from_tensors_of_their_own(tmp_path: Path) -> None:
    """transformers stacks what Mixtral's files hold matrix by matrix."""
    model = KINDS["mixtral"].build(1)
    save(model, tmp_path / "model")
    base = open_base(tmp_path / "model")
    state = model.state_dict()
    with Weights(base) as weights:
        finder = ParameterFinder(base, weights, "model.")
        parameters = finder.find("", state)
        assert [each.name for each in parameters] == list(state)
        stacked = {each.name: len(each.parts) for each in parameters if len(each.parts) > 1}
        assert stacked["model.layers.1.mlp.experts.gate_up_proj"] == 8
        assert stacked["model.layers.1.mlp.experts.down_proj"] == 4
        loaded = state_of(parameters, weights, CPU)
        read = sum(each.read_bytes(weights) for each in parameters)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in state.items())
    assert read == sum(tensor.nbytes for tensor in base.checkpoint.tensors.values())
    assert all(each.nbytes == state[each.name].nbytes for each in parameters)
    assert all(each.loading_nbytes <= 2 * each.nbytes for each in parameters)


def test_only_the_resident_layer_is_in_memory(tmp_path: Path) -> None:
    base = make_base("gemma3_text", tmp_path / "model")
    with Weights(base) as weights:
        model = StreamedModel(base, weights, PROMPTS)
        layers, outside = model._layers, model._decoder.norm.weight
        with model.opened(CPU):
            assert not model._decoder.norm.weight.is_meta
            with model.resident(1, CPU):
                here = [all(not tensor.is_meta for tensor in layer.state_dict().values()) for layer in layers]
                away = [all(tensor.is_meta for tensor in layer.state_dict().values()) for layer in layers]
                assert here == [False, True, False]
                assert away == [True, False, True]
            assert all(tensor.is_meta for layer in layers for tensor in layer.state_dict().values())
        assert outside.is_meta
        assert all(tensor.is_meta for tensor in model._decoder.state_dict().values())


def test_bytes_of_masks_grow_with_the_square_of_the_run(tmp_path: Path) -> None:
    base = make_base("gemma3_text", tmp_path / "model")
    with Weights(base) as weights:
        model = StreamedModel(base, weights, PROMPTS)
        with model.opened(CPU):
            for length in (1, 5, 20):
                found = tensors_of(model.calls(Shape(1, length), CPU))
                assert model.call_bytes(Shape(1, length)) == sum(each.nbytes for each in found)
            assert model.call_bytes(Shape(1, 40)) > 3 * model.call_bytes(Shape(1, 20))


def test_states_that_lie_otherwise_in_memory_are_kept_right(tmp_path: Path) -> None:
    turned = torch.arange(6.0).view(2, 3).T[None]
    for spill in (None, tmp_path):
        with keep_states([Shape(1, 3)], 2, spill=spill) as states:
            states[0] = turned
            assert torch.equal(states[0], turned)
