"""Resolves the name of a model to a folder: a local folder or GGUF file, the built-in model, a model in a package, or a
download from a hub."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from . import builtin, packaged
from .gguf import folder as gguf
from .types import ModelError

BUILTIN = "builtin"
SMALL_FILES = ["*.json", "*.jinja", "*.model", "*.txt"]  # configuration, tokenizer, chat templates
WEIGHTS = ["*.safetensors"]
# Further copies of the weights that many repositories have, in subfolders and in the vendor's own format.
COPIES = ["*/*", "consolidated*"]
log = logging.getLogger("pequod.engine")
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


GGUF_TYPE = re.compile(r"[A-Za-z0-9][\w.-]{0,63}")  # such as Q4_K_M
# An image encoder, statistics of activations, and all parts but the first
NO_MODEL = re.compile(r".*mmproj|.*imatrix(_unsloth)?\.gguf|.*-(?!00001)\d{5}-of-\d{5}\.gguf")


@dataclass(frozen=True, slots=True)
class Folder:
    """A model's folder.

    `revision` is the commit of a model that was downloaded from a hub. `sampling` has the defaults of a packaged model,
    whose file has none.
    """

    path: Path
    revision: str | None = None
    sampling: Mapping[str, float | int] = field(default_factory=dict)


def fetch(model: str, revision: str | None = None, *, weights: bool, local_files_only: bool = False) -> Folder:
    """Return the folder of a model, downloading it if necessary: with `weights`, or only the small files.

    With `local_files_only` nothing is downloaded. HF_HOME, HF_TOKEN, HF_ENDPOINT and HF_HUB_OFFLINE apply as in
    huggingface_hub. Raises ModelError.
    """
    if model in ("", BUILTIN):
        return Folder(builtin.path())
    if model in packaged.PACKAGES:
        file = packaged.find(model)
        if file is None:
            raise ModelError(f"{model} is not on this machine; run `pequod pull {model}`")
        return Folder(gguf.folder_of(file), sampling=packaged.PACKAGES[model].sampling)
    try:
        if (found := _local(model)) is not None:
            return found
    except OSError as error:
        raise ModelError(f"{model} cannot be read: {error.strerror}") from None
    name, _, kind = model.partition(":")
    if not HUB_ID.fullmatch(name) or (kind and not GGUF_TYPE.fullmatch(kind)):
        raise ModelError(f"there is no folder {model}, and it is not the name of a model on a hub either")
    if not kind and name.lower().endswith("-gguf"):
        raise ModelError(f"the name of {model} needs the type of a GGUF file after a colon, such as {model}:Q4_K_M")
    if not kind:
        patterns = SMALL_FILES + (WEIGHTS if weights else [])
        return _download(model, revision, patterns, COPIES, local_files_only=local_files_only)
    patterns = [pattern for each in {kind, kind.lower(), kind.upper()} for pattern in _named(each)]
    found = _download(name, revision, patterns, ["*mmproj*"], local_files_only=local_files_only)
    typed = re.compile(rf"(.*[-._/])?{re.escape(kind)}([-.].*)?\.gguf", re.IGNORECASE)
    files = [file for file in found.path.rglob("*.gguf") if typed.fullmatch(file.name)]
    if not files:
        raise ModelError(f"{name} has no GGUF file of the type {kind}")
    return replace(found, path=_converted(found.path, files))


def _local(model: str) -> Folder | None:
    """Return the folder of a model that is a folder or a file here; None: it is neither. Raises ModelError and
    OSError."""
    path = Path(os.path.expanduser(model))  # Path.expanduser raises for an unknown user
    if path.is_dir():
        if (path / "config.json").exists():
            return Folder(path)
        return Folder(_converted(path, [path / name for name in os.listdir(path) if name.endswith(".gguf")]))
    if path.suffix == ".gguf" and path.is_file():
        return Folder(gguf.folder_of(path))
    if path.exists():
        raise ModelError(f"{model} is a file; give a GGUF file, or the folder that holds config.json and the weights")
    return None


def _named(kind: str) -> list[str]:
    """Return the patterns of the names of GGUF files of a type: F16 must not download those in BF16."""
    return [f"{start}{kind}{end}" for start in ("", "*[-._/]") for end in (".gguf", "[-.]*.gguf")]


def _converted(folder: Path, files: list[Path]) -> Path:
    """Return the model folder of the only model among some GGUF files; without files, the folder itself."""
    models = [file for file in files if not NO_MODEL.match(file.name)]
    if len(models) > 1:
        names = ", ".join(sorted(file.name for file in models))
        raise ModelError(f"{folder} holds several GGUF files: {names}; name one of them")
    return gguf.folder_of(models[0]) if models else folder


def _download(
    model: str, revision: str | None, patterns: list[str], ignored: list[str] | None = None, *, local_files_only: bool
) -> Folder:
    from huggingface_hub import constants, errors, snapshot_download  # takes 0.3 s; a local folder needs none of it

    hub, named = constants.ENDPOINT, f" at the revision {revision!r}" if revision else ""
    try:
        path = snapshot_download(
            model,
            revision=revision,
            allow_patterns=patterns,
            ignore_patterns=ignored,
            local_files_only=local_files_only,
        )
    except errors.GatedRepoError:
        raise ModelError(
            f"{model} is open only to accounts that its owner has let in: ask for access at {hub}/{model} "
            "and set HF_TOKEN to a token of that account"
        ) from None
    except errors.RepositoryNotFoundError:
        raise ModelError(
            f"there is no folder {model} here and no such model on {hub}, or it is private and HF_TOKEN gives no access"
        ) from None
    except errors.RevisionNotFoundError:
        raise ModelError(f"the model {model} on {hub} has no revision {revision or 'main'!r}") from None
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled):
        setting = "`local_files_only`" if local_files_only else "HF_HUB_OFFLINE" if constants.HF_HUB_OFFLINE else ""
        reason = f"{setting} is set" if setting else f"{hub} cannot be reached"
        raise ModelError(
            f"{model}{named} is neither a folder here nor complete in the cache {constants.HF_HUB_CACHE}, and {reason}"
        ) from None
    except errors.HfHubHTTPError as error:
        status = getattr(error.response, "status_code", "no")
        raise ModelError(f"{hub} returned status {status} for {model}{named}") from None
    except (OSError, ValueError) as error:  # for example a full disk, or an invalid name
        raise ModelError(f"cannot download {model}{named} from {hub}: {_first_line(error)}") from None
    except Exception as error:
        # A proxy that fails, or a connection that is reset: huggingface_hub falls back to its cache only for errors of
        # its own, and lets those of httpx through, in newer versions those of httpx2.
        if type(error).__module__.partition(".")[0] not in ("httpx", "httpx2"):
            raise
        try:
            found = _download(model, revision, patterns, ignored, local_files_only=True)
        except ModelError:
            raise ModelError(f"cannot download {model}{named} from {hub}: {_first_line(error)}") from None
        log.warning("cannot reach %s (%s); using revision %s from the cache", hub, _first_line(error), found.revision)
        return found
    # The cache has a folder for each commit, named after it.
    return Folder(Path(path), os.path.basename(path))


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
