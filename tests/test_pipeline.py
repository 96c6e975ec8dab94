"""Stages run, resume, refuse and account for themselves: on notebooks made here."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import psutil
import pytest
from papermill.exceptions import PapermillExecutionError

from specformer import pipeline
from specformer.errors import UserError
from specformer.pipeline import NOTEBOOKS, read_stages, run_notebook, run_stage

ROOT = Path(__file__).parent.parent


def write_notebook(file: Path, *cells: str, parameters: str = 'profile = "smoke"') -> Path:
    first = nbformat.v4.new_code_cell(parameters, metadata={"tags": ["parameters"]})
    content = nbformat.v4.new_notebook(
        cells=[first, *map(nbformat.v4.new_code_cell, cells)],
        metadata={"kernelspec": {"name": "python3", "language": "python", "display_name": "x"}},
    )
    file.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(content, file)
    return file


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A small repository: the smoke profile and two stages, the second of them resumable."""
    shutil.copytree(ROOT / "params" / "smoke", tmp_path / "params" / "smoke", symlinks=True)
    (tmp_path / "dvc.yaml").write_text(
        """
stages:
  code:
    deps: [notebooks/02_self_distillation.ipynb]
    outs: ["build/${profile}/02_self_distillation.py"]
  distill:
    deps: ["build/${profile}/02_self_distillation.py"]
    params:
      - params/${profile}/params.yaml: [seed, distill]
    outs:
      - data/${profile}/distilled: {persist: true}
    metrics:
      - results/${profile}/distill.json: {cache: false}
"""
    )
    build = tmp_path / "build" / "smoke"
    build.mkdir(parents=True)
    (build / "02_self_distillation.py").write_text("first version")
    return tmp_path


WORK = """
from pathlib import Path
shards = Path("../data/smoke/distilled")
shards.mkdir(parents=True, exist_ok=True)
found = len(list(shards.iterdir()))
(shards / f"shard-{found}").touch()
"""
FINISH = 'Path("../results/smoke/distill.json").write_text(str(found))'


def notebook(project: Path, *cells: str) -> None:
    write_notebook(project / "notebooks" / "02_self_distillation.ipynb", *cells)


def shards(project: Path) -> list[str]:
    return sorted(os.listdir(project / "data/smoke/distilled"))


def test_a_stage_runs_its_notebook_and_records_its_cost(project, capsys):
    notebook(project, WORK, FINISH, "print('profile', profile)")
    run_stage("distill", "smoke", project)
    assert (project / "results/smoke/distill.json").read_text() == "0"
    executed = nbformat.read(project / "results/smoke/notebooks/02_self_distillation.ipynb", 4)
    assert [cell.execution_count for cell in executed.cells] == [1, 2, 3, 4, 5]
    costs = json.loads((project / "results/smoke/costs.json").read_text())
    assert costs["distill"].keys() == {"seconds", "peak_memory_gib", "disk_gib"}
    assert costs["distill"]["seconds"] > 0
    assert costs["distill"]["peak_memory_gib"] > 0.02
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == "profile smoke"
    assert shown[1].startswith("stage distill: ")
    planned = dict(pipeline.plan("smoke", project))
    assert planned["code"] is None
    assert planned["distill"] == pipeline.Cost(**costs["distill"])


def test_an_interrupted_stage_goes_on_and_a_complete_one_starts_afresh(project):
    notebook(project, WORK, "1 / 0")
    with pytest.raises(PapermillExecutionError, match="ZeroDivisionError"):
        run_stage("distill", "smoke", project)
    assert shards(project) == ["shard-0"]

    notebook(project, WORK, FINISH)
    run_stage("distill", "smoke", project)
    assert shards(project) == ["shard-0", "shard-1"]

    run_stage("distill", "smoke", project)
    assert shards(project) == ["shard-0"]


@pytest.mark.parametrize("change", ["code", "settings", "marker"])
def test_partial_work_of_other_inputs_is_not_continued(project, change):
    notebook(project, WORK, "1 / 0")
    with pytest.raises(PapermillExecutionError):
        run_stage("distill", "smoke", project)
    if change == "code":
        (project / "build/smoke/02_self_distillation.py").write_text("second version")
    elif change == "settings":
        params = project / "params/smoke/params.yaml"
        params.write_text(params.read_text().replace("seed: 0", "seed: 1"))
    else:  # outputs of unknown origin, such as those that `dvc checkout` brings
        (project / "data/smoke/.done/distill.json").unlink()
    notebook(project, WORK, WORK, FINISH)
    run_stage("distill", "smoke", project)
    assert shards(project) == ["shard-0", "shard-1"]


def test_settings_of_other_stages_do_not_matter(project):
    notebook(project, WORK, "1 / 0")
    with pytest.raises(PapermillExecutionError):
        run_stage("distill", "smoke", project)
    params = project / "params/smoke/params.yaml"
    params.write_text(params.read_text().replace("rounds: 1", "rounds: 2"))
    notebook(project, WORK, FINISH)
    run_stage("distill", "smoke", project)
    assert shards(project) == ["shard-0", "shard-1"]


def test_a_stage_that_forgets_an_output_is_not_complete(project):
    notebook(project, WORK)
    with pytest.raises(UserError, match="without writing results/smoke/distill.json"):
        run_stage("distill", "smoke", project)
    assert not (project / "results/smoke/costs.json").exists()


def test_missing_inputs_are_named(project):
    (project / "build/smoke/02_self_distillation.py").unlink()
    notebook(project, WORK)
    with pytest.raises(UserError, match="needs build/smoke/02_self_distillation.py"):
        run_stage("distill", "smoke", project)


def command(project: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "specformer", *arguments],
        cwd=project,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_an_error_for_people_inside_a_notebook_is_one_line(project):
    notebook(
        project,
        "from specformer.errors import UserError",
        "raise UserError('no disk space: free 3 GiB')",
    )
    process = command(project, "stage", "distill", "smoke")
    _, err = process.communicate(timeout=300)
    assert process.returncode == 2
    assert err == "error: no disk space: free 3 GiB\n"


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM], ids=["ctrl-c", "kill"])
def test_a_stopped_stage_keeps_its_work_and_leaves_no_process(project, sent):
    notebook(
        project,
        WORK,
        "import os, pathlib; pathlib.Path('../pid').write_text(str(os.getpid()))",
        "import time; time.sleep(120)",
    )
    process = command(project, "stage", "distill", "smoke")
    pid = project / "pid"
    deadline = time.monotonic() + 300
    while not (pid.exists() and pid.read_text()):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)
    time.sleep(0.5)
    process.send_signal(sent)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 130
    assert err.strip() == "interrupted: what was done is kept; run it again to go on"
    assert not psutil.pid_exists(int(pid.read_text()))
    notebook(project, WORK, FINISH)
    run_stage("distill", "smoke", project)
    assert shards(project) == ["shard-0", "shard-1"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["stage", "train", "smoke"], "unknown stage 'train'; the stages are: code, distill"),
        (["stage", "distill", "cpu"], "unknown profile 'cpu'; there are: smoke"),
        (["check", "cpu"], "unknown profile 'cpu'; there are: smoke"),
    ],
)
def test_the_command_line_refuses(project, arguments, expected):
    process = command(project, *arguments)
    out, err = process.communicate(timeout=300)
    assert (process.returncode, out, err) == (2, "", f"error: {expected}\n")


def test_the_command_line_plans(project):
    """With what the last run took, or else with what the profile's folder says that one took."""
    estimate = project / "params" / "smoke" / "costs.json"
    estimate.unlink(missing_ok=True)
    out, _ = command(project, "plan", "smoke").communicate(timeout=300)
    assert re.search(r"distill\W+not measured yet", out)
    estimate.write_text(json.dumps({"distill": {"seconds": 90.0, "peak_memory_gib": 1.5, "disk_gib": 0.25}}))
    out, _ = command(project, "plan", "smoke").communicate(timeout=300)
    assert re.search(r"distill\W+1\.5\W+1\.5\W+0\.25", out)


def test_notebook_parameters_are_checked(tmp_path):
    file = write_notebook(tmp_path / "trial.ipynb", parameters='profile = "smoke"\nsteps = 3')
    out = tmp_path / "out.ipynb"
    with pytest.raises(UserError, match="no parameter 'profil'; .* profile, steps"):
        run_notebook(file, out, {"profil": "cpu"})
    with pytest.raises(UserError, match="steps = '4' must be of type int, like its default 3"):
        run_notebook(file, out, {"steps": "4"})
    with pytest.raises(UserError, match="no notebook"):
        run_notebook(tmp_path / "other.ipynb", out, {})
    assert not out.exists()


def test_a_notebook_runs_in_this_interpreter_and_its_own_folder(tmp_path):
    file = write_notebook(
        tmp_path / "in" / "trial.ipynb", "import os, sys\nprint(sys.executable, os.getcwd())"
    )
    out = tmp_path / "out" / "trial.ipynb"
    run_notebook(file, out, {"profile": "cpu"})
    shown = nbformat.read(out, 4).cells[-1].outputs[0].text
    assert shown == f"{sys.executable} {file.parent}\n"


def test_a_killed_kernel_is_told_to_people(tmp_path):
    file = write_notebook(tmp_path / "trial.ipynb", "import os; os.kill(os.getpid(), 9)")
    with pytest.raises(UserError, match="kernel of trial.ipynb died"):
        run_notebook(file, tmp_path / "out.ipynb", {"profile": "smoke"})


def test_refreshing_twice_gives_the_same_bytes(tmp_path):
    file = write_notebook(tmp_path / "trial.ipynb", "print(1)\n2")
    pipeline.refresh_notebook(file)
    once = file.read_bytes()
    pipeline.refresh_notebook(file)
    assert file.read_bytes() == once
    content = nbformat.reads(once.decode(), 4)
    assert content.metadata.keys() == {"kernelspec", "language_info"}
    assert content.cells[0].metadata == {"tags": ["parameters"]}
    assert content.cells[1].outputs[0].text == "1\n"


def test_code_cells_do_not_change_with_outputs(tmp_path):
    file = write_notebook(tmp_path / "trial.ipynb", "print(1)")
    before = pipeline.code_cells(file)
    pipeline.refresh_notebook(file)
    assert pipeline.code_cells(file) == before == '# %%\nprofile = "smoke"\n# %%\nprint(1)\n'


def test_a_run_opens_from_the_notebooks_folder(project, monkeypatch):
    (project / "notebooks").mkdir()
    monkeypatch.chdir(project / "notebooks")
    run = pipeline.open_run("smoke")
    assert run.root == project
    assert run.paths.distilled == project / "data/smoke/distilled"
    assert run.settings.draft.draft_length == 4
    with pytest.raises(
        UserError,
        match=r"missing data/smoke/drafts: run `dvc repro params/smoke/dvc.yaml` \(stage train\)",
    ):
        run.require(run.paths.drafts, "train")
    assert run.require(project / "params", "none") == project / "params"
    monkeypatch.chdir(project.parent)
    with pytest.raises(UserError, match="not inside the specformer repository"):
        pipeline.open_run("smoke")


def test_the_meter_sees_the_memory_of_children():
    with pipeline.Meter(interval=0.05) as meter:
        subprocess.run(
            [sys.executable, "-c", "import time; x = b'1' * 300_000_000; time.sleep(0.5)"],
            check=True,
        )
    assert meter.peak_bytes > 300_000_000 + psutil.Process().memory_info().rss / 2
    assert meter.seconds > 0.5


TRAINING = """
from pathlib import Path

from specformer.errors import UserError


class Course:
    def train(self, name, seed, folder):
        broken = Path("broken")
        if broken.exists() and name == broken.read_text():
            raise UserError(f"{name} does not train")
        folder.mkdir(parents=True)
        (folder / "file").write_text(f"{name} {seed}")


def open_course(run):
    return Course()
"""


@pytest.fixture(scope="module")
def dvc_project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The repository's own pipeline, with notebooks that write what dvc.yaml says they write, and training
    that takes no time."""
    project = tmp_path_factory.mktemp("dvc")
    for name in ("params", "specformer"):
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, project / name, symlinks=True, ignore=ignore)
    for name in ("dvc.yaml", "profile.yaml", "params.yaml", ".gitignore", ".dvcignore"):
        shutil.copy(ROOT / name, project / name, follow_symlinks=False)
    (project / "specformer" / "study.py").write_text(TRAINING)
    (project / ".dvc").mkdir()
    (project / ".dvc" / "config").write_text(
        (ROOT / ".dvc" / "config").read_text().replace("[core]", "[core]\n    no_scm = true")
    )
    stages = read_stages("smoke", ROOT)
    for stage, name in NOTEBOOKS.items():
        # the page is made from the notebook, not by it
        outs = [Path("..") / out for out in stages[stage].outs if Path(out).suffix != ".html"]
        write = f"from pathlib import Path\nfor out in {list(map(str, outs))}:\n" + (
            "    out = Path(out)\n"
            "    text = '{\"x\": 1}' if out.suffix == '.json' else 'step,loss\\n1,2\\n'\n"
            "    (out if out.suffix else out / 'file').parent.mkdir(parents=True, exist_ok=True)\n"
            "    (out if out.suffix else out / 'file').write_text(text)\n"
        )
        write_notebook(project / "notebooks" / f"{name}.ipynb", write)
    return project


def dvc(project: Path, *arguments: str) -> str:
    env = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        [sys.executable, "-m", "dvc", *arguments],
        cwd=project,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_dvc_reads_each_profile(dvc_project):
    listed = dvc(dvc_project, "stage", "list", "--all", "--name-only").split()
    own = [f.parent.name for f in (ROOT / "params").glob("*/dvc.yaml")]
    assert set(listed) == {
        *read_stages("cpu", ROOT),
        *(f"params/{p}/dvc.yaml:{stage}" for p in own for stage in read_stages(p, ROOT)),
    }
    for target, profile in [("code", "cpu"), ("params/smoke/dvc.yaml:code", "smoke")]:
        shown = dvc(dvc_project, "repro", "--dry", target)
        assert f"> python -m specformer stage code {profile}\n" in shown


def test_a_second_repro_runs_nothing_and_a_saved_output_neither(dvc_project):
    smoke = "params/smoke/dvc.yaml"
    # Stages with a notebook; what they stand on is data that other tests make.
    for folder in ("packages", "base", "corpus"):
        (dvc_project / "data/smoke" / folder).mkdir(parents=True)
        (dvc_project / "data/smoke" / folder / "file").write_text("x")
    (dvc_project / "results/smoke").mkdir(parents=True)
    (dvc_project / "results/smoke/corpus.json").write_text("{}")
    dvc(dvc_project, "commit", "--force", *(f"{smoke}:{s}" for s in ("fetch", "base", "corpus")))

    first = dvc(dvc_project, "repro", smoke)
    for stage in NOTEBOOKS:
        assert f"stage {stage} smoke" in first
    assert "Running stage" not in dvc(dvc_project, "repro", smoke)

    pipeline.refresh_notebook(dvc_project / "notebooks/06_report.ipynb")
    again = dvc(dvc_project, "repro", smoke)
    assert re.findall(r"Running stage '.*:(\w+)'", again) == ["code"]

    params = dvc_project / "params/smoke/params.yaml"
    params.write_text(params.read_text().replace("title: ", "title: Second "))
    again = dvc(dvc_project, "repro", smoke)
    assert re.findall(r"Running stage '.*:(\w+)'", again) == ["report"]

    # one more draft, which fails: the others stay, and so does one more that does not
    text = params.read_text().replace("specformer_no_self_distill]", "specformer_no_self_distill, larger]")
    params.write_text(text.replace("[ngram, medusa, eagle3]", "[ngram, medusa, eagle3, mtp]"))
    (dvc_project / "broken").write_text("larger")
    done = subprocess.run(
        [sys.executable, "-m", "dvc", "repro", "--keep-going", smoke],
        cwd=dvc_project,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0 and "error: larger does not train" in done.stderr
    ran = re.findall(r"Running stage '.*:([\w@-]+)'", done.stdout)
    assert sorted(ran) == ["baseline@mtp", "draft@larger-0"]
    (dvc_project / "broken").unlink()
    again = dvc(dvc_project, "repro", smoke)
    ran = re.findall(r"Running stage '.*:([\w@-]+)'", again)
    assert ran[0] == "draft@larger-0" and sorted(ran[1:]) == ["ablate", "report", "scale", "train"]

    assert "results/smoke/metrics.json" in dvc(dvc_project, "metrics", "show")
    assert "training.csv" in dvc(dvc_project, "plots", "show", "--json")
