"""The command line: `specformer <command>`, also as `python -m specformer <command>`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from specformer import pipeline, settings
from specformer.errors import UserError

if TYPE_CHECKING:
    from specformer.base import Base
    from specformer.engine import Request

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=__doc__)
bench = typer.Typer(no_args_is_help=True, help="Benchmarks: each prints ratios measured within one run.")
app.add_typer(bench, name="bench")
Profile = Annotated[str, typer.Argument(help="A folder of params/, such as cpu or smoke.")]


@app.command()
def profiles() -> None:
    """List the profiles."""
    for name in settings.profiles(pipeline.find_root()):
        print(name)


@app.command()
def check(profile: Profile) -> None:
    """Check a profile's settings, without running anything."""
    run = pipeline.open_run(profile)
    print(f"{profile}: the settings are right (base {run.settings.base.source})")


@app.command()
def plan(profile: Profile = "cpu") -> None:
    """Show the stages and what each took when it was last measured."""
    rows = pipeline.plan(profile)
    table = Table("stage", "minutes", "peak memory, GiB", "disk, GiB", title=f"profile {profile}")
    for column in table.columns[1:]:
        column.justify = "right"
    for name, cost in rows:
        if cost is None:
            table.add_row(name, "not measured yet", "", "")
        else:
            memory, disk = f"{cost.peak_memory_gib:.1f}", f"{cost.disk_gib:.2f}"
            table.add_row(name, f"{cost.seconds / 60:.1f}", memory, disk)
    known = [cost for _, cost in rows if cost]
    if known:
        table.add_section()
        minutes = f"{sum(cost.seconds for cost in known) / 60:.0f}"
        memory = f"{max(cost.peak_memory_gib for cost in known):.1f}"
        table.add_row("all", minutes, memory, f"{sum(cost.disk_gib for cost in known):.2f}")
        table.caption = "as measured before; a stage that is up to date costs nothing"
    Console().print(table)


@app.command()
def stage(name: Annotated[str, typer.Argument(help="A stage of dvc.yaml.")], profile: Profile) -> None:
    """Run one stage of the pipeline; `dvc repro` calls this."""
    pipeline.run_stage(name, profile)


@app.command()
def train(
    profile: Profile,
    name: Annotated[str, typer.Argument(help="A draft of the profile: of study.variants or baselines.")],
    seed: int = 0,
) -> None:
    """Train one draft, or go on, outside the pipeline: torchrun ... -m specformer train PROFILE NAME."""
    pipeline.train_draft(pipeline.open_run(profile), name, seed)


@app.command()
def notebooks() -> None:
    """Run the notebooks at their defaults and store their outputs in them."""
    folder = pipeline.find_root() / "notebooks"
    for name in pipeline.NOTEBOOKS.values():
        print(f"running {name}")
        pipeline.refresh_notebook(folder / f"{name}.ipynb")


@app.command()
def generate(
    prompt: Annotated[
        str | None, typer.Option(help="One prompt; without it, a JSON line each from --input.")
    ] = None,
    input: Annotated[Path | None, typer.Option(help="JSONL file; - or nothing: standard input.")] = None,
    output: Annotated[
        Path | None, typer.Option(help="JSONL file for the answers; default: the screen.")
    ] = None,
    profile: Annotated[str, typer.Option(help="Whose base LLM and draft to use.")] = "cpu",
    draft: Annotated[
        str | None,
        typer.Option(help="Draft: folder or hub name; default: the profile's best, else the packaged one."),
    ] = None,
    base: Annotated[
        str | None, typer.Option(help="Base LLM: folder or hub name; default: the profile's.")
    ] = None,
    k: Annotated[
        str | None,
        typer.Option(help="Draft tokens per step; 0: plain decoding; auto: what pays at each step."),
    ] = None,
    batch_size: int = 8,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    stop: Annotated[list[str] | None, typer.Option(help="Stop string; may be given several times.")] = None,
    chat: Annotated[bool, typer.Option(help="Apply the chat template.")] = True,
    max_length: Annotated[int, typer.Option(help="Most tokens of one row, prompt and answer.")] = 2048,
) -> None:
    """Answer prompts; accepted draft tokens are green.

    JSONL lines hold "prompt" or "messages", and may set temperature, stop, max_new_tokens, ... for
    themselves. Exits with 1 when some lines could not be answered.
    """
    from specformer import generation
    from specformer.base import load_base
    from specformer.drafts import load_draft
    from specformer.engine import Engine, Request

    run = pipeline.open_run(profile)
    llm = load_base(base) if base else run.load_base()
    defaults = Request("1", [], max_new_tokens, temperature, top_k, top_p, seed, tuple(stop or ()))
    wanted = int(k) if k is not None and k.isdecimal() else k
    if not (wanted is None or wanted == "auto" or isinstance(wanted, int)):
        raise UserError(f"--k is {k}: give a whole number from 0 on, or auto")
    model = None
    if wanted != 0:
        model = load_draft(draft or _best_draft(run, llm), llm)
        wanted = min(4, model.draft_length) if wanted is None else wanted
    max_length = min(max_length, llm.max_positions)
    engine = Engine(
        llm,
        model,
        k=wanted,
        batch_size=1 if prompt else batch_size,
        max_length=max_length,
        attention=run.settings.engine.attention,
        compile=run.settings.engine.compile,
    )
    if prompt is not None:
        for result in engine.run([generation.make_request(llm, {"prompt": prompt}, defaults, chat=chat)]):
            Console().print(generation.coloured(result, llm.tokenizer), soft_wrap=True)
            record = generation.as_record(result)
            if "steps" in record:
                shown = f"{record['accepted']} of {len(result.ids)} tokens came from the draft model, "
                shown += f"{record['tokens_per_step']:.2f} tokens per step"
                Console(stderr=True).print(shown, style="dim")
        return

    faults = 0

    def requests() -> Iterator[Request]:
        nonlocal faults
        source = sys.stdin if input is None or str(input) == "-" else input.open()
        for entry in generation.read_jsonl(llm, source, defaults, max_length, chat=chat):
            if isinstance(entry, str):
                faults += 1
                print(f"error: {entry}", file=sys.stderr)
            else:
                yield entry

    if input is not None and str(input) != "-" and not input.exists():
        raise UserError(f"{input} does not exist: give a JSONL file of prompts")
    sink = output.open("w") if output else sys.stdout
    for result in engine.run(requests()):
        print(json.dumps(generation.as_record(result), ensure_ascii=False), file=sink, flush=True)
    if faults:
        print(f"error: {faults} line(s) could not be answered, the others were", file=sys.stderr)
        sys.exit(1)


def _best_draft(run: pipeline.Run, llm: Base) -> Path:
    """The profile's own trained draft, else the one that comes with the package for this base LLM."""
    from specformer.pretrained import packaged_folder

    trained = [run.trained[name, run.settings.study.seeds[0]] for name in reversed(run.methods)]
    found = next((folder for folder in trained if folder.exists()), None) or packaged_folder(llm)
    return found or run.draft(run.methods[-1])


@app.command("package")
def package_draft(
    profile: Profile = "cpu",
    name: Annotated[str | None, typer.Option("--draft", help="Default: the profile's best.")] = None,
) -> None:
    """Replace the draft that comes with the package by one of the profile's; writes its record and card."""
    import pandas as pd

    from specformer import pretrained, sharing
    from specformer.base import load_base
    from specformer.drafts import load_draft

    run = pipeline.open_run(profile)
    source = run.draft(name or run.methods[-1])
    machine = pd.read_csv(run.require(run.paths.results / "draft_quality.csv", "train")).iloc[0].to_dict()
    llm = load_base(run.require(run.paths.base, "base"), dtype="float32", device="cpu")
    folder = pretrained.package(
        source,
        llm,
        load_draft(source, llm),
        command=f"dvc repro (profile {profile}, commit {machine['commit']})",
        data=f"prompts of {run.settings.corpus.source}, answers by the base LLM",
        machine=machine,
    )
    print((folder / sharing.CARD).read_text())


@app.command()
def share(
    folder: Annotated[Path, typer.Argument(help="A trained draft, such as data/<profile>/drafts/0/<name>.")],
    repo: Annotated[str, typer.Argument(help="Its name on the hub, OWNER/NAME.")],
    data: Annotated[
        str | None,
        typer.Option(help="Source and licence of its dialogues; default: what its profile says."),
    ] = None,
    base: Annotated[
        str | None, typer.Option(help="Hub name of its base LLM, where that was a folder here.")
    ] = None,
    private: bool = False,
    dry_run: Annotated[bool, typer.Option(help="Write the folder that would be uploaded, and stop.")] = False,
) -> None:
    """Upload a draft with its model card and the code by which transformers decodes with it."""
    from specformer import hub, sharing
    from specformer.drafts.interface import CONFIG, read_config

    if not hub.is_name(repo):
        raise UserError(f"{repo!r} is no name of a repository: give OWNER/NAME")
    root, name = pipeline.find_root(), read_config(folder / CONFIG, folder).base_name
    inside = folder.resolve().is_relative_to(root / "data")
    metrics = []
    if inside:  # not of any other folder: its name may be that of another run
        run = pipeline.open_run(folder.resolve().relative_to(root / "data").parts[0], root)
        data = data or pipeline.origin_of_dialogues(run, sharing.read_summary(folder))
        if folder.resolve().parent == (run.paths.drafts / str(run.settings.study.seeds[0])).resolve():
            table = run.paths.results / "tables" / "table1.csv"
            metrics = sharing.table_metrics(table, str(table.relative_to(root)), folder.name, name)
    if data is None:
        raise UserError(f"{folder} is of no profile here: say with --data where its dialogues come from")
    out = root / "build" / "share" / repo
    sharing.write_folder(folder, out, data=data, metrics=metrics, base_name=base)
    print(f"wrote {out.relative_to(root)}")
    if not dry_run:
        print(f"uploaded to {hub.upload(out, repo, private=private)}")


@app.command()
def readme() -> None:
    """Fill the README's numbers from results/cpu."""
    from specformer.readme import render

    root = pipeline.find_root()
    file = root / "README.md"
    file.write_text(render(file.read_text(), root / "results" / "cpu"))


@bench.command("loss")
def bench_loss(profile: Profile = "cpu", anchors: int = 512) -> None:
    """Time and peak memory of the chunked head loss against the plain loss, at the profile's vocabulary."""
    from specformer.bench_loss import bench_loss
    from specformer.tables import write_text

    run = pipeline.open_run(profile)
    folder = run.require(run.paths.base, "base")
    record = bench_loss(folder, anchors=anchors, draft_length=run.settings.draft.draft_length)
    path = run.paths.results / "loss_bench.json"
    write_text(json.dumps(record, indent=2) + "\n", path)
    print(
        f"{anchors} anchors x {record['draft_length']} positions: memory {record['memory_ratio']:.2f}x and "
        f"time {record['time_ratio']:.2f}x of the plain loss ({path.relative_to(run.root)})"
    )


@bench.command("training")
def bench_training(
    profile: Profile = "cpu",
    draft_length: int = 8,
    steps: Annotated[int, typer.Option(help="Optimizer steps of one measurement.")] = 4,
    repeats: Annotated[int, typer.Option(help="Measurements of each loop, after one to warm up.")] = 3,
) -> None:
    """Throughput and peak memory of the training loop against a plain one, on the profile's dialogues."""
    from specformer.bench_training import Workload, bench_training
    from specformer.shards import read_rows
    from specformer.tables import write_text

    run = pipeline.open_run(profile)
    draft, train = run.settings.draft, run.settings.train
    work = Workload(
        str(run.require(run.paths.base, "base")),
        read_rows(run.require(run.paths.distilled / "train", "distill")),
        draft.hooks,
        {
            "draft_length": draft_length,
            "draft_attention": draft.draft_attention,
            "positional": draft.positional,
            "layers": draft.layers,
            "vocabulary": draft.vocabulary,
        },
        steps,
        **train.model_dump(
            include={
                "sequences_per_step",
                "micro_batch",
                "max_length",
                "anchor_fraction",
                "anchor_decay",
                "lr",
                "clip",
            }
        ),
        dtype=run.settings.base.dtype,
        device=run.settings.base.device,
        seed=run.settings.seed,
    )
    record = bench_training(work, repeats)
    path = run.paths.results / "training_bench.json"
    write_text(json.dumps(record, indent=2) + "\n", path)
    low, high = record["throughput_ratio_spread"]
    print(
        f"{record['tokens']} tokens, {record['labels']} labels, l_d {draft_length}; against the plain loop:\n"
        f"hidden states computed: throughput {record['throughput_ratio']:.2f}x ({low:.2f} to {high:.2f}), "
        f"peak memory {record['peak_memory_ratio']:.2f}x\n"
        f"hidden states cached: throughput {record['throughput_ratio_cached']:.2f}x, "
        f"peak memory {record['peak_memory_ratio_cached']:.2f}x\n"
        f"and {record['vocabulary'] or 'all'} tokens to draft, as {profile} trains: throughput "
        f"{record['throughput_ratio_profile']:.2f}x, peak memory {record['peak_memory_ratio_profile']:.2f}x\n"
        f"peak of a step {record['computed_peak_gib']:.2f} GiB, of its tensors "
        f"{record['computed_tensors_peak_gib']:.2f} GiB, by the formula "
        f"{record['estimated_peak_gib']:.2f} GiB ({path.relative_to(run.root)})"
    )


LONGEST = 200
"""Most prompt tokens of a request that systems are compared on."""


def _held_out(run: pipeline.Run, llm: Base, max_new_tokens: int) -> list[Request]:
    """Requests from the profile's held-out dialogues, of 20 to LONGEST prompt tokens."""
    from specformer.bench import evaluation_requests
    from specformer.chat import encode_prompt
    from specformer.corpora import read_dialogues

    rows = read_dialogues(run.require(run.paths.corpus / "test.parquet", "corpus"))
    rows = [row | {"set": "dialogues"} for row in rows]
    requests = evaluation_requests(rows, lambda m: encode_prompt(llm.tokenizer, m), max_new_tokens)
    return [r for r in requests if 20 <= len(r.prompt_ids) <= LONGEST]


@bench.command("engine")
def bench_engine(
    profile: Profile = "cpu",
    batch_size: Annotated[list[int] | None, typer.Option(help="May be given several times.")] = None,
    k: int = 4,
    rounds: Annotated[int, typer.Option(help="Timed rounds, after one to warm up.")] = 3,
    max_new_tokens: int = 128,
    draft: Annotated[
        str | None,
        typer.Option(help="Draft: folder or hub name; default: the profile's best, else the packaged one."),
    ] = None,
    waves: Annotated[int, typer.Option(help="Requests of a round, in batches.")] = 1,
    vllm_python: Annotated[str | None, typer.Option(help="Python of an environment with vLLM.")] = None,
) -> None:
    """Our k = 0 and SpecFormer against transformers, its prompt lookup, and vLLM where it is named."""
    from specformer import figures, hardware
    from specformer.bench_engine import bench_engine
    from specformer.drafts import load_draft
    from specformer.tables import write_text

    run = pipeline.open_run(profile)
    llm = run.load_base()
    model = load_draft(draft or _best_draft(run, llm), llm)
    requests = _held_out(run, llm, max_new_tokens)
    path = run.paths.results / "engine_bench.csv"
    table = bench_engine(
        llm,
        model,
        requests,
        batch_sizes=batch_size or [1, 4, 16, 64],
        k=k,
        rounds=rounds,
        max_length=LONGEST + max_new_tokens,
        attention=run.settings.engine.attention,
        compile=run.settings.engine.compile,
        waves=waves,
        vllm_python=vllm_python,
        folder=run.paths.base,
        keep=lambda table: write_text(table.to_csv(index=False, float_format="%.4f"), path),
    )
    machine = hardware.caption(hardware.describe(llm.dtype, llm.device))
    figures.engine_ratios(
        table,
        run.paths.figures / "engine",
        caption=f"{llm.name}, {max_new_tokens} new tokens, {rounds} rounds; {machine}.",
    )
    shown = table.drop(columns=["cpu", "dtype", "threads", "kernels", "rounds"])
    print(shown.to_string(index=False, float_format=lambda x: f"{x:.2f}", na_rep=""))


@bench.command("vllm")
def bench_vllm(
    profile: Profile = "cpu",
    *,
    vllm_python: Annotated[str, typer.Option(help="Python of an environment with vLLM.")],
    batch_size: Annotated[
        list[int] | None, typer.Option(help="Concurrent requests; may be given several times.")
    ] = None,
    k: int = 4,
    rounds: Annotated[int, typer.Option(help="Timed rounds, after one to warm up.")] = 3,
    max_new_tokens: int = 128,
    draft: Annotated[
        Path | None, typer.Option(help="Draft folder; default: the profile's best, else the packaged one.")
    ] = None,
    waves: Annotated[int, typer.Option(help="Requests of a round, in batches.")] = 1,
) -> None:
    """vLLM with our draft against vLLM alone."""
    from specformer import hardware
    from specformer.bench_vllm import bench_vllm
    from specformer.tables import write_text

    run = pipeline.open_run(profile)
    llm = run.load_base()
    path = run.paths.results / "vllm_bench.csv"
    table = bench_vllm(
        vllm_python,
        run.paths.base.resolve(),
        (draft or _best_draft(run, llm)).resolve(),
        _held_out(run, llm, max_new_tokens),
        batch_sizes=batch_size or [1, 16, 64],
        k=k,
        rounds=rounds,
        max_length=LONGEST + max_new_tokens + k,
        machine=hardware.describe(llm.dtype, llm.device),
        waves=waves,
        keep=lambda table: write_text(table.to_csv(index=False, float_format="%.4f"), path),
    )
    shown = table.drop(columns=["cpu", "dtype", "threads", "kernels", "rounds"])
    print(shown.to_string(index=False, float_format=lambda x: f"{x:.2f}"))


def main() -> None:
    """Run the command line; errors for people end with status 2, Ctrl-C with 130."""
    # Progress must show as it comes, also through a pipe.
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    try:
        app()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except SystemExit as stop:
        if stop.code == 130:  # typer's answer to Ctrl-C
            print("interrupted: what was done is kept; run it again to go on", file=sys.stderr)
        raise
