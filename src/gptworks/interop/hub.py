"""Models on the Hugging Face hub: fetch a model into the cache, or push an exported folder.

huggingface_hub does the transfers, so its cache, `HF_ENDPOINT`, `HF_HOME` and `HF_TOKEN` work as usual. Progress is
shown if stderr is a terminal.
"""

import contextlib
import fnmatch
import importlib
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gptworks import __version__
from gptworks.checkpoint import Report
from gptworks.errors import RunError, UserError
from gptworks.files import naming_disk_errors
from gptworks.interop.huggingface.importing import INDEX, PICKLED, WEIGHTS, read_folder_config, read_index
from gptworks.terminal import unguarded
from gptworks.tokenizer import load_tokenizer

_ID = re.compile(r"(?P<name>\w[\w.-]*/\w[\w.-]*)(?:@(?P<revision>[\w./-]+))?", re.ASCII)

_SETTINGS = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
             "special_tokens_map.json", "chat_template.jinja", "chat_template.json",
             "additional_chat_templates/*.jinja", "adapter_config.json")  # fmt: skip
_ADAPTER = "adapter_model.safetensors"
_USER: dict[str, Any] = {"library_name": "gptworks", "library_version": __version__}


@dataclass(frozen=True)
class Fetched:
    """A model's folder and its origin."""

    folder: Path
    source: str
    """Name and commit on the hub; empty for a local folder."""


def find_model(place: str, report: Report = lambda _: None) -> Fetched:
    """Return a model's folder: `place` if it is a folder, else the fetched model `ORG/NAME[@revision]` of the hub.

    Only settings, tokenizer, chat template and safetensors are fetched. Weights come last, so that an unsupported model
    is refused before its weights are fetched.

    Raises:
        UserError: the folder or model does not exist, or is gated or unsupported; the message suggests a fix.
        RunError: the network fails, or the disk is full.
    """
    if Path(place).is_dir():
        return Fetched(Path(place), "")
    named = _ID.fullmatch(place)
    if named is None:
        raise UserError(
            f"{place}: no such folder. Give a Hugging Face folder, a PEFT folder, or the name of a model on the hub "
            f"with its owner, such as HuggingFaceTB/SmolLM2-135M."
        )
    return _fetch(named["name"], named["revision"], report)


def _fetch(name: str, revision: str | None, report: Report) -> Fetched:
    from huggingface_hub import HfApi, constants, snapshot_download
    from huggingface_hub.hf_api import RepoFile

    cache, where = Path(constants.HF_HUB_CACHE), f"{name}@{revision}" if revision else name
    report(f"there is no local folder {where}: looking for it at {constants.ENDPOINT}")
    with _explaining(name, where, cache):
        small = [*_SETTINGS, INDEX]
        folder = Path(snapshot_download(name, revision=revision, allow_patterns=small, tqdm_class=_quiet(), **_USER))
        commit = folder.name
        needed = _needed(name, folder)
        missing = [file for file in needed if not (folder / file).exists()]
        if missing:
            entries = HfApi(**_USER).list_repo_tree(name, revision=commit)
            sizes = {entry.path: entry.size for entry in entries if isinstance(entry, RepoFile)}
            _check_files(name, missing, sizes)
            n_bytes = sum(sizes[file] for file in missing)
            _check_room(n_bytes, cache, where)
            report(f"fetching {n_bytes:,} bytes of {where}, commit {commit[:12]}")
            bars = None if sys.stderr.isatty() else _quiet()
            with unguarded():  # let the progress bars move the cursor
                snapshot_download(name, revision=commit, allow_patterns=missing, tqdm_class=bars, **_USER)
    return Fetched(folder, f"{name} at commit {commit}")


def _needed(name: str, folder: Path) -> list[str]:
    """Return the names of a model's weight files, according to the settings already fetched to `folder`. Raises a
    UserError if gptworks does not support the model."""
    if (folder / "adapter_config.json").exists():
        return [_ADAPTER]
    if not (folder / "config.json").exists():
        raise UserError(f"{name} on the hub has no config.json: it is not a model for transformers.")
    read_folder_config(folder)
    if not (folder / "tokenizer.json").exists():
        raise UserError(
            f"{name} on the hub has no tokenizer.json, which gptworks reads. transformers can make one from its files: "
            f'AutoTokenizer.from_pretrained("{name}").save_pretrained("FOLDER"), with the model in the same folder.'
        )
    load_tokenizer(folder)
    return sorted(set(read_index(folder).values())) if (folder / INDEX).exists() else [WEIGHTS]


def _check_files(name: str, needed: list[str], there: dict[str, int]) -> None:
    """Raise UserError if a needed file is missing or not safetensors. The message explains how to convert pickles."""
    absent = [file for file in needed if file not in there or not file.endswith(".safetensors")]
    if not absent:
        return
    pickled = sorted(file for file in there if any(fnmatch.fnmatch(file, kind) for kind in PICKLED))
    if pickled and absent == [WEIGHTS]:
        raise UserError(
            f"{name} has its weights only in {pickled[0]}, a kind of file that can run code when it is read: gptworks "
            f"reads safetensors. Look for a converted revision among the pull requests on the model's page (import it "
            f"as {name}@refs/pr/1), or, if you trust its owner, convert it with transformers: "
            f'AutoModelForCausalLM.from_pretrained("{name}").save_pretrained("FOLDER"), and the tokenizer as well; '
            f"then import FOLDER."
        )
    raise UserError(f"{name} on the hub has no {absent[0]}: gptworks needs its weights in safetensors.")


def _check_room(n_bytes: int, cache: Path, where: str) -> None:
    folder = next(folder for folder in (cache, *cache.absolute().parents) if folder.is_dir())
    if n_bytes > (free := shutil.disk_usage(folder).free):
        raise RunError(
            f"{where} needs {n_bytes:,} bytes, and the disk of the cache {cache} has {free:,} free: make room, or set "
            f"HF_HOME to a folder on another disk."
        )


def check_push(name: str) -> None:
    """Check, before an export begins, that its upload has a valid name and a token. The hub is not asked, so the upload
    can still fail, for example if the token has no write access.

    Raises:
        UserError: `name` is not ORG/NAME, or no token is set.
    """
    from huggingface_hub import get_token

    named = _ID.fullmatch(name)
    if named is None or named["revision"] is not None:
        raise UserError(f"--push {name}: give a name on the hub with its owner, such as my-name/my-model.")
    if get_token() is None:
        raise UserError(
            f"--push {name} needs a token with write access: set HF_TOKEN, or log in with `hf auth login`. "
            f"Create one at {_endpoint()}/settings/tokens."
        )


def push_folder(folder: Path, name: str, report: Report = lambda _: None) -> str:
    """Upload a folder to the model `name` in one commit that replaces the model's weights. A new model is private.

    Returns:
        The commit's URL.

    Raises:
        UserError: the token is missing or has no write access, or `name` is not valid.
        RunError: the network or the hub fails.
    """
    from huggingface_hub import HfApi

    check_push(name)
    report(f"uploading it to {_endpoint()}/{name}")
    with _explaining(name, name, folder, "uploaded"):
        api = HfApi(**_USER)
        api.create_repo(name, private=True, exist_ok=True)
        commit = api.upload_folder(
            repo_id=name,
            folder_path=folder,
            commit_message="Upload with gptworks",
            delete_patterns="model*.safetensors*",
        )
    return str(commit.commit_url)


def _endpoint() -> str:
    from huggingface_hub import constants

    return constants.ENDPOINT


def _quiet() -> Any:
    """Return a class of progress bars that show nothing."""
    bar: Any = importlib.import_module("huggingface_hub.utils").tqdm

    def disabled(self: Any, *args: Any, **options: Any) -> None:
        bar.__init__(self, *args, **options | {"disable": True})

    return type("Quiet", (bar,), {"__init__": disabled})


@contextlib.contextmanager
def _explaining(name: str, where: str, place: Path, done: str = "fetched") -> Iterator[None]:
    """Convert errors of huggingface_hub to UserError or RunError, each with advice.

    Args:
        where: the model's name with the requested revision.
        place: the local folder that the transfer reads or writes.
        done: the word for the transfer in messages: fetched or uploaded.
    """
    from huggingface_hub import errors, get_token

    page = f"{_endpoint()}/{name}"
    try:
        with naming_disk_errors(
            f"{where} could not be {done}", place, "Make room there, or set HF_HOME to another disk."
        ):
            yield
    except (UserError, RunError):
        raise
    except errors.GatedRepoError:
        account = (
            f"The account of your token has no access yet: accept the licence at {page}, and wait for its owner if the "
            f"page says so."
            if get_token()
            else f"Log in there, accept it at {page}, and set HF_TOKEN to a token of that account "
            f"({_endpoint()}/settings/tokens)."
        )
        raise UserError(
            f"{name} is gated: its owner asks you to accept a licence before you fetch it. {account}"
        ) from None
    except errors.RevisionNotFoundError:
        raise UserError(
            f"{where}: the model is on the hub, but has no branch, tag or commit of that name. See {page}/tree/main."
        ) from None
    except errors.RepositoryNotFoundError:
        raise UserError(
            f"{name}: there is no local folder of that name, and no model at {_endpoint()}, or it is private. Search "
            f"{_endpoint()}/models; for a private model set HF_TOKEN."
        ) from None
    except errors.HFValidationError as error:
        raise UserError(f"{where} is not a valid name on the hub: {error}") from None
    except Exception as error:  # the transfer libraries' errors have no common base class
        response = getattr(error, "response", None)
        if done == "uploaded" and getattr(response, "status_code", None) in (401, 403):
            raise UserError(f"your token may not write to {page}: use one with write access.") from None
        cause = error.__cause__ or error
        raise RunError(
            f"{where} could not be {done}: {_endpoint()} does not answer as expected "
            f"({type(cause).__name__}: {' '.join(str(cause).split())[:200]}). Check the network, and HF_ENDPOINT if it "
            f"is set."
        ) from error
