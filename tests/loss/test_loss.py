"""Losses of models that are read layer by layer, compared with those of transformers' whole models."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kits import quantised_models
from kits.checkpoint_maker import fields, llama_shapes, write_checkpoint, write_json
from kits.command_line import run_command
from kits.gate_stages import random_texts, reading_base
from kits.layer_streams import BIG, KINDS, altered, make_base, open_base
from kits.marks import slow_but
from kits.model_parents import save
from kits.tokenizer_maker import word_level
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

import raymerge
from raymerge.errors import NonFiniteError, OptionError, PlanError
from raymerge.planner.inputs.sources import Source
from raymerge.stages.loss import EVALUATION, Evaluator
from raymerge.stages.streamed_model import LayerStream, Shape
from raymerge.stages.texts import Text, TextReader, Window

FAMILIES = (
    *("llama", "gemma2", "mixtral", "cohere", "gpt2", "gptj", "gpt_neox", "opt", "bloom", "granite"),
    *("deepseek_v3", "gpt_oss", "llama4_text", "qwen3_next", "lfm2", "olmoe", "gemma3_text", "qwen3_moe"),
)
DISTINCT = ("llama", "gemma2", "mixtral", "cohere", "gpt2", "gptj", "gpt_neox", "opt")
"""An own head and tied ones, caps and factors of logits, experts, a bias, a head by another name, projections
around the layers."""
LENGTHS = (9, 5, 33, 33, 13)
MIB = 1 << 20


def windows(*lengths: int, high: int = 60, seed: int = 5) -> tuple[Window, ...]:
    chance = np.random.default_rng(seed)
    judged = (np.arange(length) > 0 for length in lengths)
    return tuple(
        Window(chance.integers(3, high, length), each) for length, each in zip(lengths, judged, strict=True)
    )


def evaluated(base: Source, texts: Sequence[Text], spill: Path, *, budget: int = BIG) -> list[float]:
    found = Evaluator(texts, memory=budget, spill=spill).losses(base)
    assert [each.num_tokens for each in found] == [text.num_judged for text in texts]
    return [each.loss for each in found]


def whole_model(root: Path | str) -> Any:
    return AutoModelForCausalLM.from_pretrained(root, dtype=torch.float32, attn_implementation="eager").eval()


def expected_loss(model: Any, given: Sequence[Window]) -> float:
    """Window by window, in float64 from the logits on."""
    total, count = 0.0, 0
    for window in given:
        tokens = torch.from_numpy(window.tokens)[None]
        with torch.no_grad():
            logits = model(input_ids=tokens, use_cache=False).logits[0].double()
        each = torch.nn.functional.cross_entropy(logits[:-1], tokens[0, 1:], reduction="none")
        judged = torch.from_numpy(window.is_judged[1:])
        total, count = total + float(each[judged].sum()), count + int(judged.sum())
    return total / count


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", slow_but(FAMILIES, *DISTINCT))
def test_as_the_whole_model(tmp_path: Path, name: str) -> None:
    base = make_base(name, tmp_path / "model")
    texts = [Text("one", windows(*LENGTHS)), Text("other", windows(33, seed=6))]
    model = whole_model(tmp_path / "model")
    expected = [expected_loss(model, text.windows) for text in texts]
    assert evaluated(base, texts, tmp_path) == pytest.approx(expected, abs=1e-5)


def test_a_model_of_several_modalities_reads_text(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "vocab_size": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}
    vision = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "out_hidden_size": 32}
    kinds = ("image", "video", "vision_start", "vision_end")
    tokens = {f"{kind}_token_id": 60 + number for number, kind in enumerate(kinds)}
    text_config = {**sizes, **heads, "rope_parameters": rope}
    config = Qwen2_5_VLConfig(text_config=text_config, vision_config=vision, **tokens)
    torch.manual_seed(1)
    model = Qwen2_5_VLForConditionalGeneration(config).eval()
    model.save_pretrained(tmp_path / "model")
    given = windows(*LENGTHS)
    found = evaluated(open_base(tmp_path / "model"), [Text("t", given)], tmp_path)
    assert found == pytest.approx([expected_loss(model, given)], abs=1e-5)


def test_only_some_tokens_of_some_windows_are_judged(tmp_path: Path) -> None:
    base = make_base("llama", tmp_path / "model")
    given = [Window(each.tokens, np.arange(len(each.tokens)) % 3 == 1) for each in windows(9, 33, 33)]
    model = whole_model(tmp_path / "model")
    for count in (1, 2, 3):
        found = evaluated(base, [Text("t", tuple(given)).first(count)], tmp_path)
        assert found == pytest.approx([expected_loss(model, given[:count])], abs=1e-5)


def test_a_stored_head_counts_though_the_config_ties_it(tmp_path: Path) -> None:
    llama = make_base("llama", tmp_path / "llama")
    base = altered(llama, tmp_path / "model", tie_word_embeddings=True)
    texts = [Text("t", windows(9))]
    assert evaluated(base, texts, tmp_path) == evaluated(llama, texts, tmp_path)


def test_little_memory_changes_nothing_but_rounding(tmp_path: Path) -> None:
    config = {"vocab_size": 5000}
    save(KINDS["llama"].build(1, **config), tmp_path / "model")
    base, texts = open_base(tmp_path / "model"), [Text("t", windows(*[64] * 40, high=5000))]
    least = LayerStream(base, EVALUATION).least_budget(Shape(1, 64))
    large, again, small = (evaluated(base, texts, tmp_path, budget=each) for each in (BIG, BIG, least))
    assert large == again
    assert small == pytest.approx(large, abs=1e-6)
    assert not list(tmp_path.glob("*.bin"))
    with pytest.raises(OptionError, match=f"The smallest that works is {least} bytes"):
        evaluated(base, texts, tmp_path, budget=least - 1)
    with pytest.raises(OptionError, match=f"The smallest that works is {3 * least} bytes"):
        Evaluator(texts, memory=3 * least - 1, spill=tmp_path, num_shares=3).losses(base)


def _decoded(made: quantised_models.QuantisedModel, root: Path, *, turned: bool) -> Path:
    """The same numbers, plain."""
    config = json.loads((made.root / "config.json").read_text())
    config = {key: value for key, value in config.items() if key != "quantization_config"}
    tensors = {
        name: torch.as_tensor(values).float().transpose(-1, -2).contiguous()
        if turned and name in made.quantised
        else torch.as_tensor(values).float()
        for name, values in made.values.items()
    }
    return write_checkpoint(root, tensors, config)


@pytest.mark.parametrize("name", ["deepseek_v3", "gpt_oss", "three_formats"])
def test_codes_are_the_numbers_that_they_stand_for(tmp_path: Path, name: str) -> None:
    made = getattr(quantised_models, name)(tmp_path / "codes", 1)
    plain = _decoded(made, tmp_path / "plain", turned=name == "gpt_oss")
    given = windows(20, 33)
    found = evaluated(open_base(made.root), [Text("t", given)], tmp_path)
    assert found == pytest.approx([expected_loss(whole_model(plain), given)], abs=1e-5)


def test_int4_as_kimi_publishes_it(tmp_path: Path) -> None:
    made = quantised_models.kimi_k2_thinking(tmp_path / "codes", 1)
    for root in (made.root, _decoded(made, tmp_path / "plain", turned=False)):
        config = json.loads((root / "config.json").read_text())
        write_json(root / "config.json", {**config, "model_type": "deepseek_v3"})
    given = windows(20, 33)
    found = evaluated(open_base(made.root), [Text("t", given)], tmp_path)
    assert found == pytest.approx([expected_loss(whole_model(tmp_path / "plain"), given)], abs=1e-5)


@pytest.mark.parametrize(
    ("tensor", "where"),
    [
        ("model.embed_tokens.weight", "the embedding gives NaN or infinity for t."),
        ("model.layers.1.mlp.up_proj.weight", "layer 1 gives NaN or infinity for t."),
        ("model.layers.2.mlp.up_proj.weight", "the last layer gives NaN or infinity for t."),
        ("lm_head.weight", "the head gives NaN or infinity for t."),
    ],
)
def test_what_is_not_finite_says_where(tmp_path: Path, tensor: str, where: str) -> None:
    llama = make_base("llama", tmp_path / "llama")
    state = load_file(Path(llama.checkpoint.root) / "model.safetensors")
    state[tensor][:, 0] = math.nan
    base = altered(llama, tmp_path / "model", state)
    with pytest.raises(NonFiniteError) as raised:
        evaluated(base, [Text("t", windows(9))], tmp_path)
    assert where in str(raised.value)


def test_models_that_are_not_run_layer_by_layer(tmp_path: Path) -> None:
    base = make_base("mamba", tmp_path / "model")
    with pytest.raises(PlanError, match=r"state space .* Measure it by a program"):
        evaluated(base, [Text("t", windows(9))], tmp_path)
    llama = make_base("llama", tmp_path / "llama")
    encoder = altered(llama, tmp_path / "encoder", architectures=["BertForMaskedLM"], model_type="bert")
    with pytest.raises(PlanError, match="is an encoder, which predicts masked tokens"):
        evaluated(encoder, [Text("t", windows(9))], tmp_path)


# Texts ---------------------------------------------------------------------------------------------


def tokens_of(text: Text) -> list[list[int]]:
    return [window.tokens.tolist() for window in text.windows]


def judged_of(text: Text) -> list[list[int]]:
    return [window.tokens[window.is_judged].tolist() for window in text.windows]


def written(path: Path, content: str) -> str:
    path.write_text(content)
    return str(path)


def test_a_text_is_cut_into_full_windows_that_begin_as_a_sequence_does(tmp_path: Path) -> None:
    base = reading_base(tmp_path / "model")
    path = written(tmp_path / "t.txt", " ".join(f"w{number}" for number in range(3, 20)))
    (text,) = TextReader(base, length=6).read([path])
    assert tokens_of(text) == [[1, *range(at, at + 5)] for at in (3, 8, 13)]
    assert judged_of(text) == [[*range(at, at + 5)] for at in (3, 8, 13)]
    (short,) = TextReader(base, length=60).read([path])
    assert tokens_of(short) == [[1, *range(3, 20)]]
    (some,) = TextReader(base, length=6, num_tokens=7).read([path])
    assert judged_of(some) == [[3, 4, 5, 6, 7], [8, 9]]
    without_start = {"tokenizer_class": "PreTrainedTokenizerFast"}
    write_json(tmp_path / "model" / "tokenizer_config.json", without_start)
    (tmp_path / "model" / "special_tokens_map.json").unlink()
    (plain,) = TextReader(open_base(tmp_path / "model"), length=6).read([path])
    assert tokens_of(plain) == [[*range(at, at + 6)] for at in (3, 9)]
    assert judged_of(plain) == [[*range(at + 1, at + 6)] for at in (3, 9)]


def test_windows_are_what_the_model_reads_at_once(tmp_path: Path) -> None:
    base = reading_base(tmp_path / "model")
    most = base.checkpoint.config["max_position_embeddings"]
    assert TextReader(base).length == min(512, most)
    with pytest.raises(OptionError, match=f"reads {most} at once"):
        TextReader(base, length=most + 1)


TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'user' %}w10 {{ m.content }} w11 {% else %}w12 "
    "BEGIN{{ m.content }} </s>END {% endif %}{% endfor %}{% if add_generation_prompt %}w12 {% endif %}"
)
PLAIN = TEMPLATE.replace("BEGIN", "").replace("END", "")
MARKED = TEMPLATE.replace("BEGIN", "{% generation %}").replace("END", "{% endgeneration %}")
LAST_ONLY = PLAIN.replace("{{ m.content }} </s>", "{% if loop.last %}w13 {% endif %}{{ m.content }} </s>")
TALK = [("user", "w20 w21"), ("assistant", "w30 w31"), ("user", "w22"), ("assistant", "w32")]


def talking(root: Path, template: str) -> Source:
    base = reading_base(root)
    config = json.loads((root / "tokenizer_config.json").read_text())
    write_json(root / "tokenizer_config.json", {**config, "chat_template": template})
    return base


def chat(path: Path, *conversations: Sequence[tuple[str, str]]) -> str:
    rows = [
        {"messages": [{"role": role, "content": content} for role, content in each]} for each in conversations
    ]
    return written(path, "\n".join(map(json.dumps, rows)) + "\n")


@pytest.mark.parametrize("template", [PLAIN, MARKED])
def test_what_the_assistant_says_is_judged(tmp_path: Path, template: str) -> None:
    path = chat(tmp_path / "talk.jsonl", TALK, TALK[:2])
    (text,) = TextReader(talking(tmp_path / "model", template)).read([path])
    assert judged_of(text) == [[30, 31, 2, 32, 2], [30, 31, 2]]
    assert tokens_of(text)[1] == [10, 20, 21, 11, 12, 30, 31, 2]


def test_neither_a_byte_order_mark_nor_line_breaks_within_strings_change_what_is_read(tmp_path: Path) -> None:
    talk = json.dumps(
        {"messages": [{"role": "user", "content": "w20"}, {"role": "assistant", "content": "w30 w31"}]}
    )
    lines = [talk.replace("w30 w31", f"w30{each}w31") for each in " \u2028\x85"]
    path = written(tmp_path / "talk.jsonl", "\n".join(["\ufeff" + lines[0], *lines[1:]]))
    (text,) = TextReader(talking(tmp_path / "model", PLAIN)).read([path])
    assert judged_of(text) == [[30, 31, 2]] * 3


def test_neither_a_line_break_behind_a_turn_nor_a_blank_before_an_answer_matters(tmp_path: Path) -> None:
    """Tokens with the blank before them, and a line break behind each turn."""
    template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}</s>\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    base = talking(tmp_path / "model", template)
    pieces = ["<unk>", "<s>", "</s>", "▁yes", "▁no", "▁user", "▁assistant", "user", "assistant", ":", "\n"]
    tokenizer = word_level(pieces, added=["<s>", "</s>"])
    tokenizer["pre_tokenizer"] = {
        "type": "Sequence",
        "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": " ?\\w+|:|\n"}, "behavior": "Isolated", "invert": False},
            {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "never", "split": False},
        ],
    }
    write_json(tmp_path / "model" / "tokenizer.json", tokenizer)
    path = chat(tmp_path / "talk.jsonl", [("user", "no"), ("assistant", "yes")])
    (text,) = TextReader(base).read([path])
    assert tokens_of(text) == [[7, 9, 4, 2, 10, 8, 9, 3, 2, 10]]
    assert judged_of(text) == [[3, 2]]


def test_an_earlier_answer_that_is_shown_otherwise_is_judged_as_the_last(tmp_path: Path) -> None:
    path = chat(tmp_path / "talk.jsonl", TALK)
    (text,) = TextReader(talking(tmp_path / "model", LAST_ONLY)).read([path])
    assert judged_of(text) == [[13, 30, 31, 2], [13, 32, 2]]
    assert tokens_of(text)[1] == [10, 20, 21, 11, 12, 30, 31, 2, 10, 22, 11, 12, 13, 32, 2]


def test_long_conversations_are_cut(tmp_path: Path) -> None:
    path = chat(tmp_path / "talk.jsonl", TALK)
    (text,) = TextReader(talking(tmp_path / "model", PLAIN), length=7).read([path])
    assert tokens_of(text) == [[1, 10, 20, 21, 11, 12, 30], [1, 31, 2, 10, 22, 11, 12], [1, 32, 2]]
    assert judged_of(text) == [[30], [31, 2], [32, 2]]


@pytest.mark.parametrize("template", [PLAIN, MARKED, LAST_ONLY])
def test_all_of_a_conversation_counts_where_nothing_is_said_of_answers(tmp_path: Path, template: str) -> None:
    """Each once, up to the number of tokens, and those that nobody answers."""
    path = chat(tmp_path / "talk.jsonl", TALK[:1], TALK)
    reader = TextReader(talking(tmp_path / "model", template), num_tokens=9, judges_all=True)
    (text,) = reader.read([path])
    assert tokens_of(text) == [[10, 20, 21, 11], [10, 20, 21, 11, 12, 30, 31]]
    assert judged_of(text) == [each[1:] for each in tokens_of(text)]


def test_conversations_without_an_answer_are_left_out(tmp_path: Path) -> None:
    path = chat(tmp_path / "talk.jsonl", TALK[:1], TALK)
    (text,) = TextReader(talking(tmp_path / "model", PLAIN)).read([path])
    assert judged_of(text) == [[30, 31, 2, 32, 2]]


def test_a_greeting_is_not_judged_by_templates_that_refuse_no_messages(tmp_path: Path) -> None:
    path = chat(tmp_path / "talk.jsonl", TALK[1:])
    refusing = f"{{% if not messages %}}{{{{ raise_exception('none') }}}}{{% endif %}}{PLAIN}"
    (text,) = TextReader(talking(tmp_path / "model", refusing)).read([path])
    assert judged_of(text) == [[32, 2]]


def test_a_conversation_that_begins_as_a_sequence_does_begins_so_once(tmp_path: Path) -> None:
    path = chat(tmp_path / "talk.jsonl", TALK)
    (text,) = TextReader(talking(tmp_path / "model", f"<s> {PLAIN}"), length=7).read([path])
    assert tokens_of(text)[0] == [1, 10, 20, 21, 11, 12, 30]


def test_every_file_that_cannot_be_read(tmp_path: Path) -> None:
    base = talking(tmp_path / "model", "{{ raise_exception('no system') }}")
    paths = [
        written(tmp_path / "empty.txt", ""),
        str(tmp_path / "absent.txt"),
        written(tmp_path / "text.jsonl", '{"text": "w3"}\n'),
        written(tmp_path / "broken.jsonl", "\n{\n"),
        chat(tmp_path / "refused.jsonl", TALK),
    ]
    (tmp_path / "latin.txt").write_bytes(b"\xe9")
    with pytest.raises(PlanError) as raised:
        TextReader(base).read([*paths, str(tmp_path / "latin.txt")])
    problems = [f"{problem.where} {problem.what}" for problem in raised.value.problems]
    for problem, said in zip(
        problems,
        (
            "empty.txt gives no token to judge",
            "absent.txt cannot be read: No such file or directory.",
            "text.jsonl, line 1 has no list of 'messages'",
            "broken.jsonl, line 2 is no JSON",
            "refused.jsonl, line 1 the chat template does not take it (TemplateError: no system).",
            "latin.txt cannot be read: it is not UTF-8.",
        ),
        strict=True,
    ):
        assert said in problem


def test_conversations_need_a_template(tmp_path: Path) -> None:
    base = reading_base(tmp_path / "model")
    with pytest.raises(PlanError, match="has no chat template"):
        TextReader(base).read([chat(tmp_path / "talk.jsonl", TALK)])


def test_tokens_beyond_the_embedding(tmp_path: Path) -> None:
    base = reading_base(tmp_path / "model")
    small = altered(base, tmp_path / "small", _cut(base, 40), vocab_size=40)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "small" / name).write_bytes((tmp_path / "model" / name).read_bytes())
    with pytest.raises(PlanError, match=r"has the token 50, and the embedding of .* has 40 rows"):
        TextReader(open_base(small.checkpoint.root)).read([written(tmp_path / "t.txt", "w3 w50")])


def _cut(base: Source, rows: int) -> dict[str, torch.Tensor]:
    state = load_file(Path(base.checkpoint.root) / "model.safetensors")
    return {
        name: tensor[:rows].clone() if name in ("model.embed_tokens.weight", "lm_head.weight") else tensor
        for name, tensor in state.items()
    }


# The command ---------------------------------------------------------------------------------------


def test_the_command_and_the_function(tmp_path: Path) -> None:
    reading_base(tmp_path / "model")
    paths = [written(tmp_path / f"{n}.txt", random_texts(n, 70)[0]) for n in range(2)]
    found = raymerge.evaluate(tmp_path / "model", paths, length=32, threads=1)
    model = whole_model(tmp_path / "model")
    texts = TextReader(open_base(tmp_path / "model"), length=32).read(paths)
    expected = [expected_loss(model, text.windows) for text in texts]
    assert [each.loss for each in found.texts] == pytest.approx(expected, abs=1e-5)
    assert [each.num_tokens for each in found.texts] == [62, 62]
    assert found.mean == pytest.approx(sum(expected) / 2, abs=1e-5)
    options = [word for path in paths for word in ("--texts", path)]
    done = run_command(
        "evaluate", str(tmp_path / "model"), *options, "--length", "32", "--json", cwd=tmp_path
    )
    told = json.loads(done.text.splitlines()[-1])
    assert [each["loss"] for each in told["texts"]] == pytest.approx(expected, abs=1e-5)
    assert told["texts"][0]["perplexity"] == pytest.approx(math.exp(expected[0]), abs=1e-3)
    assert set(told) == {"model", "length", "device", "texts", "mean"}


def test_a_recipe_is_measured_without_being_written(tmp_path: Path) -> None:
    models = [str(tmp_path / str(seed)) for seed in (1, 2)]
    for seed, root in enumerate(models, start=1):
        reading_base(Path(root), seed=seed)
    entries = [{"model": root, "parameters": {"weight": 0.5}} for root in models]
    recipe = {"merge_method": "linear", "dtype": "bfloat16", "models": entries}
    write_json(tmp_path / "recipe.yml", recipe)
    path = written(tmp_path / "t.txt", random_texts(1, 70)[0])
    out = raymerge.submit(recipe, tmp_path / "out", raymerge.RunOptions(inline=True)).output
    expected = raymerge.evaluate(out, [path]).texts
    before = sorted(tmp_path.rglob("*"))
    for asked in (recipe, tmp_path / "recipe.yml"):
        found = raymerge.evaluate(asked, [path], memory=1 << 28)
        assert found.texts == expected
    assert found.model == str(tmp_path / "recipe.yml")
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.slow
def test_the_quickstart_s_own_evaluation_agrees(shared_root: Path) -> None:
    pack = shared_root / "behaviour"
    reference = json.loads((pack / "reference-results.json").read_text())["models"]
    names = ("code", "english", "french")
    paths = [pack / "data" / f"valid-{name}.txt" for name in names]
    for model in ("base", "far-code"):
        found = raymerge.evaluate(pack / "models" / model, paths, length=256)
        expected = [reference[model]["loss"][name] for name in names]
        assert [each.loss for each in found.texts] == pytest.approx(expected, abs=2e-5)


# Memory --------------------------------------------------------------------------------------------

MODEL = fields(
    "num_hidden_layers: 8, hidden_size: 512, intermediate_size: 2048, vocab_size: 32768, head_dim: 128, "
    "tie_word_embeddings: false"
)
SCRIPT = """
import json, sys
import numpy as np
import torch
from kits.layer_streams import open_base
from raymerge.stages.loss import EVALUATION, Evaluator
from raymerge.stages.streamed_model import LayerStream, Shape
from raymerge.stages.texts import Text, Window

def status(word):
    lines = open("/proc/self/status").read().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(word))

torch.set_num_threads(1)
small, large, spill = sys.argv[1:]
windows = tuple(Window(np.full(100, 3 + n), np.arange(100) > 0) for n in range(16))
# What is imported on the way is not what is measured.
Evaluator([Text("t", windows[:1])], memory=1 << 40, spill=spill).losses(open_base(small))
base = open_base(large)
least = LayerStream(base, EVALUATION).least_budget(Shape(1, 100))
evaluator = Evaluator([Text("t", windows)], memory=least, spill=spill)
before = status("VmRSS")
open("/proc/self/clear_refs", "w").write("5")
evaluator.losses(base)
print(json.dumps({"least": least, "grown": status("VmHWM") - before}))
"""


@pytest.mark.slow
@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="the peak cannot be reset here")
def test_a_model_larger_than_the_limit(tmp_path: Path) -> None:
    make_base("llama", tmp_path / "small")
    sizes: Mapping[str, Any] = {**KINDS["llama"].config, **MODEL}
    shapes = llama_shapes(sizes)
    tensors = {name: torch.full(shape, 0.01, dtype=torch.bfloat16) for name, shape in shapes.items()}
    config = {**sizes, "model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    write_checkpoint(tmp_path / "large", tensors, config)
    ran = subprocess.run(
        [sys.executable, "-c", SCRIPT, tmp_path / "small", tmp_path / "large", tmp_path / "spill"],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
        capture_output=True,
        text=True,
        check=True,
    )
    measured = json.loads(ran.stdout.splitlines()[-1])
    assert measured["least"] < sum(tensor.numel() for tensor in tensors.values()) * 4 // 3
    # Memory that the allocator holds on to is the process's as well.
    assert measured["grown"] <= measured["least"] + 16 * MIB
