"""The files around the package agree with each other."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import specformer
from specformer.pipeline import read_stages
from specformer.settings import load_settings, profiles

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def pins() -> dict[str, str]:
    lines = (ROOT / "requirements.lock").read_text().splitlines()
    found = dict(line.split("==") for line in lines if not line.startswith("#"))
    return {canonicalize_name(name): version for name, version in found.items()}


def test_lock_is_names_and_versions_only():
    lines = (ROOT / "requirements.lock").read_text().splitlines()
    pinned = [line for line in lines if not line.startswith("#")]
    assert len(pinned) > 100
    for line in pinned:
        assert re.fullmatch(r"[A-Za-z0-9._-]+==[0-9A-Za-z.!]+", line), line


@pytest.mark.parametrize("line", PROJECT["dependencies"] + PROJECT["optional-dependencies"]["dev"])
def test_lock_pins_each_dependency_within_its_bounds(line):
    wanted = Requirement(line)
    assert wanted.specifier.contains(pins()[canonicalize_name(wanted.name)])


def test_conda_installs_the_same_package_and_pins():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    python, _, pip = environment["dependencies"]
    assert python == "python=3.11"
    assert pip["pip"] == ["-r requirements.lock", "-e ."]
    makefile = (ROOT / "Makefile").read_text()
    assert "-r requirements.lock" in makefile
    assert "--editable ." in makefile


def test_version_is_the_same_everywhere():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == specformer.__version__
    assert citation["license"] == PROJECT["license"] == "Apache-2.0"
    assert "Version 2.0, January 2004" in (ROOT / "LICENSE").read_text()


def test_help_is_the_default_and_lists_the_targets():
    done = subprocess.run(
        ["make", "--no-print-directory"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    listed = set(re.findall(r"^  make (\w+)", done.stdout, re.MULTILINE))
    assert {"reproduce", "test", "smoke", "lab", "notebooks", "clean", "help"} <= listed


def test_ci_runs_the_tests():
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert "set -euo pipefail" in script.read_text()
    assert "make test" in script.read_text().splitlines()


def test_dvc_sends_nothing_home():
    config = (ROOT / ".dvc" / "config").read_text()
    assert "analytics = false" in config
    assert "check_update = false" in config


@pytest.mark.parametrize("profile", profiles(ROOT))
def test_each_profile_runs_the_one_pipeline(profile):
    if profile == "cpu":  # the root file runs it; a link would give its outputs two owners
        assert not (ROOT / "params/cpu/dvc.yaml").exists()
        mine, root = ROOT / "profile.yaml", "."
    else:
        link = ROOT / "params" / profile / "dvc.yaml"
        assert link.is_symlink()
        assert link.resolve() == ROOT / "dvc.yaml"
        mine, root = link.parent / "profile.yaml", "../.."
    assert yaml.safe_load(mine.read_text()) == {"profile": profile, "root": root}


def test_stages_depend_on_files_and_settings_that_exist():
    settings = load_settings("cpu", ROOT).model_dump()
    stages = read_stages("cpu", ROOT)
    made = {out for stage in stages.values() for out in stage.outs}
    for stage in stages.values():
        for dep in stage.deps:
            inside = any(out.startswith(f"{dep}/") for out in made)
            assert dep in made or inside or (ROOT / dep).exists(), f"{stage.name}: {dep}"
        for key in stage.sections:
            value = settings
            for part in key.split("."):
                value = value[part]


def test_each_stage_owns_its_outputs():
    outs = [out for stage in read_stages("smoke", ROOT).values() for out in stage.outs]
    assert len(outs) == len(set(outs))
    assert all("/smoke/" in out for out in outs)


def test_no_machine_paths_or_hosts():
    names = ["Makefile", "pyproject.toml", "requirements.lock", "environment.yml", "dvc.yaml"]
    for file in [ROOT / name for name in names] + sorted((ROOT / "params").glob("*/*.yaml")):
        assert not re.search(r"https?://|/home/|/root/|/tmp/|/work/", file.read_text()), file


def modules_used(file: Path) -> set[str]:
    """Files of the package that `file` imports, relative to the root."""
    used = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("specformer"):
            names = [f"{node.module}.{alias.name}" for alias in node.names] + [str(node.module)]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if alias.name.startswith("specformer.")]
        else:
            continue
        for name in names:
            path = Path(*name.split("."))
            if (ROOT / path.with_suffix(".py")).is_file():
                used.add(str(path.with_suffix(".py")))
            elif path != Path("specformer") and (ROOT / path).is_dir():
                used.add(str(path))
    return used


# They say what is told and where, not what comes out; what a machine chooses no file can tell; of the
# settings a stage lists the values.
SILENT = {
    "specformer/errors.py",
    "specformer/hardware.py",
    "specformer/hub.py",
    "specformer/pipeline.py",
    "specformer/progress.py",
    "specformer/settings.py",
    "specformer/sharing.py",
    "specformer/sources.py",
}


@pytest.mark.parametrize("stage", read_stages("cpu", ROOT).values(), ids=lambda stage: stage.name)
def test_a_stage_depends_on_all_modules_that_its_modules_use(stage):
    listed = {dep for dep in stage.deps if dep.startswith("specformer/")}
    files = [
        f for dep in listed for f in ([ROOT / dep] if dep.endswith(".py") else (ROOT / dep).glob("*.py"))
    ]
    used = set().union(*map(modules_used, files)) - SILENT
    missing = {path for path in used if path not in listed and str(Path(path).parent) not in listed}
    assert not missing
