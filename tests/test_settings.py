"""Every wrong setting is refused by its full name, with the value and what is allowed."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest
from ruamel.yaml import YAML

from specformer.drafts import Draft
from specformer.errors import UserError
from specformer.settings import Baseline, Settings, check_against_base, load_settings, profiles

ROOT = Path(__file__).parent.parent
PAPER = ["llama3.1-8b", "qwen2.5-3b", "qwen3-14b", "qwen3-4b", "qwen3-8b"]


def write(root: Path, changes: dict[str, Any], drop: str | None = None) -> None:
    """The smoke profile with `section.key` replaced or dropped, as profile `trial`."""
    yaml = YAML(typ="safe", pure=True)
    tree = yaml.load(ROOT / "params/smoke/params.yaml")
    for name, value in changes.items():
        *path, key = name.split(".")
        node = tree
        for part in path:
            node = node[part]
        node[key] = value
    if drop:
        section, key = drop.split(".")
        del tree[section][key]
    folder = root / "params" / "trial"
    folder.mkdir(parents=True)
    with open(folder / "params.yaml", "w") as file:
        yaml.dump(tree, file)


def refusal(root: Path, changes: dict[str, Any], drop: str | None = None) -> str:
    write(root, changes, drop)
    with pytest.raises(UserError) as caught:
        load_settings("trial", root)
    return str(caught.value)


def test_profiles():
    assert profiles(ROOT) == sorted(["cpu", "cpu-full", "cpu-long", "cpu-study", "smoke", *PAPER])


@pytest.mark.parametrize("profile", profiles(ROOT))
def test_each_profile_loads(profile):
    assert isinstance(load_settings(profile, ROOT), Settings)


@pytest.mark.parametrize("profile", PAPER)
def test_paper_profiles_have_the_papers_settings(profile):
    settings = load_settings(profile, ROOT)
    train = settings.train
    assert settings.corpus.source == "HuggingFaceH4/ultrachat_200k"
    assert settings.distill.max_new_tokens == 512
    assert (settings.draft.draft_length, settings.draft.draft_attention) == (8, "bidirectional")
    assert (train.lr, train.min_lr, train.warmup, train.eps) == (5e-4, 1e-5, 0.05, 1e-2)
    assert (train.sequences_per_step, train.epochs) == (64, 2)
    assert settings.scale.ks == (4, 6, 8)


def test_settings_are_frozen():
    with pytest.raises(ValueError, match="frozen"):
        load_settings("smoke", ROOT).draft.draft_length = 4  # type: ignore[misc]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"train.learning_rat": 1}, ["train.learning_rat", "unknown", "known are", "lr"]),
        ({"train.epoch": 1}, ["train.epoch", "did you mean 'epochs'"]),
        ({"trian": {}}, ["trian", "did you mean 'train'"]),
        ({"train.lr": "5e-4"}, ["train.lr = '5e-4'", "valid number", "above 0"]),
        ({"train.lr": -1.0}, ["train.lr = -1.0", "greater than 0"]),
        ({"train.lr": float("nan")}, ["train.lr = nan", "finite"]),
        ({"train.epochs": 1.0}, ["train.epochs = 1.0", "valid integer"]),
        ({"train.epochs": True}, ["train.epochs = True", "valid integer"]),
        ({"train.betas": [0.9]}, ["train.betas[1] is missing"]),
        (
            {"distill.servers": ["gpu1:8000"]},
            ["distill.servers[0] = 'gpu1:8000'", "such as http://gpu1:8000"],
        ),
        ({"distill.servers": ["http://me:secret@gpu1"]}, ["distill.servers[0]", "OPENAI_API_KEY"]),
        ({"distill.servers": ["http://a", "http://a"]}, ["distill.servers", "each value once"]),
        ({"distill.concurrency": 0}, ["distill.concurrency = 0", "at least 1"]),
        ({"distill.timeout_s": 0}, ["distill.timeout_s = 0", "above 0"]),
        ({"train.betas": [0.9, 1.0]}, ["train.betas[1] = 1.0", "less than 1"]),
        ({"train.micro_batch": 3}, ["train.micro_batch = 3", "divide", "= 2"]),
        ({"train.min_lr": 1.0}, ["train.min_lr = 1.0", "above train.lr"]),
        ({"train.max_length": 4}, ["train.max_length = 4", "draft.draft_length + 2 = 6"]),
        ({"corpus.train": 0}, ["corpus.train = 0", "greater than or equal to 1"]),
        ({"corpus.thinking": "no"}, ["corpus.thinking = 'no'", "valid boolean"]),
        ({"corpus.language": "english"}, ["corpus.language = 'english'", "two letters"]),
        ({"corpus.eval_sets": ["mtbench"]}, ["eval_sets[0] = 'mtbench'", "'mt_bench'"]),
        ({"baselines": ["eagle4"]}, ["baselines[0] = 'eagle4'", "'ngram', 'medusa'"]),
        ({"baselines": ["mtp", "mtp"]}, ["baselines = ['mtp', 'mtp']", "each value once"]),
        ({"baselines": ["small_llm"]}, ["small_llm = None", "local folder"]),
        ({"corpus.eval_sets": []}, ["corpus.eval_sets = []", "at least 1 item"]),
        ({"corpus.min_prompt_tokens": 97}, ["min_prompt_tokens = 97", "= 96"]),
        ({"base.device": "gpu"}, ["base.device = 'gpu'", "cuda:N"]),
        ({"base.dtype": "fp32"}, ["base.dtype = 'fp32'", "'bfloat16'"]),
        ({"draft.hooks": [0, 1.5]}, ["draft.hooks[1] = 1.5", "fraction in (0, 1)"]),
        ({"draft.hooks": [0, "last"]}, ["draft.hooks[1] = 'last'", "valid integer"]),
        ({"draft.hooks": [0, 0]}, ["draft.hooks = [0, 0]", "each value once"]),
        ({"scale.ks": [2, 5]}, ["scale.ks = 5", "draft.draft_length = 4"]),
        ({"scale.ks": [0]}, ["scale.ks[0] = 0"]),
        ({"ablate.k": 5}, ["ablate.k = 5", "draft.draft_length = 4"]),
        ({"engine.max_length": 100}, ["distill.max_new_tokens = 16", "leaves 0 after"]),
        ({"engine.max_length": 200}, ["scale.max_new_tokens = 8", "leaves 4 after"]),
        ({"engine.attention": "flsh"}, ["engine.attention = 'flsh'", "'native' or 'flash'"]),
        ({"engine.compile": "always"}, ["engine.compile = 'always'", "true, false, or auto"]),
        ({"seed": -1}, ["seed = -1"]),
        ({"distill": None}, ["distill = None"]),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_wrong_settings_are_refused(tmp_path, changes, expected):
    message = refusal(tmp_path, changes)
    assert "trial" in message
    for part in expected:
        assert part in message


def test_a_missing_setting_is_refused(tmp_path):
    assert "scale.rounds is missing: Timed repeats" in refusal(tmp_path, {}, drop="scale.rounds")


def test_every_fault_is_told_at_once(tmp_path):
    message = refusal(tmp_path, {"train.lr": 0, "scale.rounds": 0, "train.clp": 1})
    assert "3 settings are wrong" in message
    assert all(key in message for key in ["train.lr = 0", "scale.rounds = 0", "train.clp"])


def test_exponents_without_a_point_are_numbers(tmp_path):
    write(tmp_path, {})
    file = tmp_path / "params/trial/params.yaml"
    file.write_text(file.read_text().replace("lr: 0.0005", "lr: 5e-4"))
    assert "lr: 5e-4" in file.read_text()
    assert load_settings("trial", tmp_path).train.lr == 5e-4


def test_unknown_profile():
    with pytest.raises(UserError, match=r"'smoek' \(did you mean 'smoke'\?\).*cpu.*qwen3-4b"):
        load_settings("smoek", ROOT)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("seed: [1\n", "is not YAML"),
        ("seed: 1\nseed: 2\n", "duplicate key"),
        ("- seed\n", "must hold the sections seed, base"),
        ("", "must hold the sections"),
    ],
)
def test_unreadable_files(tmp_path, text, expected):
    write(tmp_path, {})
    (tmp_path / "params/trial/params.yaml").write_text(text)
    with pytest.raises(UserError, match=expected):
        load_settings("trial", tmp_path)


def test_settings_are_checked_against_the_base(tmp_path):
    write(tmp_path, {"draft.hooks": [0, 17, -2, -1]})
    settings = load_settings("trial", tmp_path)
    check_against_base(settings, num_layers=36, max_positions=256)
    with pytest.raises(UserError, match=r"draft\.hooks\[1\]: 17 is outside .* 16 layers"):
        check_against_base(settings, num_layers=16, max_positions=256)
    with pytest.raises(UserError, match=r"draft\.hooks\[2\]: -2 is HS\[17\]"):
        check_against_base(settings, num_layers=18, max_positions=256)
    with pytest.raises(UserError, match=r"engine\.max_length = 256: .* 128 tokens"):
        check_against_base(settings, num_layers=36, max_positions=128)


def test_every_baseline_that_can_be_set_exists_and_no_other():
    assert {*get_args(Baseline), "specformer"} == set(Draft.kinds)
