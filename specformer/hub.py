"""Drafts to and from a model hub: what huggingface_hub does, with its faults in words that say what to do."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from httpx2 import HTTPError
from huggingface_hub import HfApi, get_token, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from specformer.errors import UserError

LOG_IN = "run `hf auth login` or set HF_TOKEN"


def is_name(source: str) -> bool:
    """Whether `source` has the form OWNER/NAME."""
    return bool(re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", source))


def is_remote(source: str) -> bool:
    """Whether `source` is OWNER/NAME, and nothing of that name is here."""
    return is_name(source) and not Path(source).exists()


def locate(source: str | Path, files: Sequence[str], revision: str | None = None) -> Path:
    """The folder with the `files` of a draft: `source` itself, or where they were downloaded to if it is a
    hub name (kept in the hub's cache; without network those kept before).

    Raises UserError when the hub can't be reached, or has no such repository or revision for this user.
    """
    name = str(source)
    if not is_remote(name):
        return Path(source)
    with _in_words(f"{name} is no folder here, and loading it from the hub failed", name, revision):
        return Path(
            snapshot_download(name, revision=revision, allow_patterns=list(files), library_name="specformer")
        )


def upload(folder: str | Path, repo: str, *, private: bool = False) -> str:
    """Upload a folder in one commit to the model repository `repo`, made if it is not there; -> its address.

    private: make it a private one. Raises UserError for a name that is not OWNER/NAME, without a token, when
    the hub refuses it or can't be reached, and when `private` is wanted of a repository that is public.
    """
    if not is_name(repo):
        raise UserError(f"{repo!r} is no name of a repository: give OWNER/NAME")
    if get_token() is None:
        raise UserError(f"no token to upload {repo} with: {LOG_IN} (one that may write), then run it again")
    with _in_words("uploading failed", repo):
        api = HfApi(library_name="specformer")
        made = api.create_repo(repo, private=private or None, exist_ok=True)
        # the hub ignores `private` for a repository that is there
        if private and not api.model_info(repo).private:
            raise UserError(f"{repo} is there and public: make it private on the hub, or leave out --private")
        api.upload_folder(repo_id=repo, folder_path=folder, commit_message="Upload a draft by specformer")
    return str(made)


@contextmanager
def _in_words(what: str, repo: str, revision: str | None = None) -> Iterator[None]:
    """The hub's errors as UserErrors. Their own words stay out, and out of the traceback: a refused request
    may show the token that it was made with."""
    try:
        yield
    except GatedRepoError:
        reason = f"{repo} is gated: ask for access on its page, then {LOG_IN}"
    except RepositoryNotFoundError:
        reason = f"there is no {repo} that you may see: check the name; for a private one {LOG_IN}"
    except RevisionNotFoundError:
        reason = f"{repo} has no revision {revision!r}: give a branch, tag or commit of it"
    except HFValidationError:
        reason = f"{repo!r} is no name that the hub allows: give OWNER/NAME"
    except HfHubHTTPError as error:
        status = error.response.status_code
        remedy = f"{LOG_IN} with a token that may do that" if status in (401, 403) else "try later"
        reason = f"the hub answered {status} for {repo}: {remedy}"
    except (HTTPError, LocalEntryNotFoundError, ConnectionError) as error:
        reason = f"the hub could not be reached for {repo} ({type(error).__name__}): is this machine online?"
    else:
        return
    raise UserError(f"{what}: {reason}") from None
