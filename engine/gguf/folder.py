"""Converts a GGUF file to a model folder without weights, once: the folder is kept in the cache directory.

Where that cannot be written, such as in a container with a read-only home, it is kept in a temporary directory of the
user.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..types import ModelError
from ..user_cache import cache_root, is_private, make_private, temporary_root
from .config import Stored, checkpoint_names, config_of
from .reader import PART, files_of, read
from .tokenizer import Vocabulary

FORMAT = 10  # of the folders; another number makes new ones
TENSORS = "tensors.json"


def folder_of(path: Path) -> Path:
    """Return the model folder of a GGUF file, converting the file if that has not been done. Raises ModelError."""
    try:
        path = _named(path)
        stats = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files_of(path)]
        key = hashlib.sha256(repr((FORMAT, stats)).encode()).hexdigest()[:24]
        name = Path(key, model_name(path))
        folders = [cache_folder() / name, temporary_folder() / name]
        found = next((folder for folder in folders if os.path.isdir(folder) and is_converted(folder)), None)
        return found or _converted(path, *folders)
    except OSError as error:
        detail = f"{error.strerror}: {error.filename}" if error.strerror else str(error)
        raise ModelError(f"{path} cannot be converted: {detail}") from None


def _converted(path: Path, folder: Path, spare: Path) -> Path:
    """Convert a file; returns `folder`, or `spare` if that cannot be written."""
    files = _files(path)
    try:
        _write(folder, files)
        return folder
    except OSError:  # such as a read-only home
        make_private(temporary_root())
        _write(spare, files)
        return spare


def _named(path: Path) -> Path:
    """Return the absolute path of a file under the name that says which model it is.

    In a hub's cache it is the name of a link, whose target is called by its hash. Elsewhere a link may have any name,
    and its target that of a part.
    """
    target = path.resolve()
    is_part = PART.fullmatch(target.name) is not None and PART.fullmatch(path.name) is None
    return target if is_part else path.parent.resolve() / path.name


def is_converted(folder: Path) -> bool:
    """Return whether `folder_of` has written a folder, which is then trusted to name the files of its weights."""
    root = folder.parent.parent
    return root == cache_folder() or (root == temporary_folder() and is_private(temporary_root()))


def model_name(path: Path) -> str:
    """Return the name of a file's model: without the suffix and the number of a part."""
    part = PART.fullmatch(path.name)
    return part[1] if part else path.stem


def cache_folder() -> Path:
    """Return the directory of converted headers."""
    return cache_root() / "gguf"


def temporary_folder() -> Path:
    """Return the directory of those for which `cache_folder` cannot be written."""
    return temporary_root() / "gguf"


def _files(path: Path) -> dict[str, Any]:
    """Return file name -> content of the folder."""
    model = read(path)
    stored = checkpoint_names(model)
    files = {file: number for number, file in enumerate(sorted({str(each.tensor.file) for each in stored.values()}))}
    tensors = {name: _listed(each, files) for name, each in stored.items()}
    listed = {"files": list(files), "tensors": tensors}
    return {"config.json": config_of(model), **Vocabulary(model.metadata).files(), TENSORS: listed}


def _listed(stored: Stored, files: Mapping[str, int]) -> dict[str, Any]:
    """Return a tensor as GgufCheckpoint reads it: models have up to 100,000, so what is the usual is left out."""
    tensor = stored.tensor
    found = {
        "file": files[str(tensor.file)],
        "shape": tensor.shape,
        "type": tensor.type,
        "offset": tensor.offset,
        "num_bytes": tensor.num_bytes,
    }
    seldom = {
        "interleaved": stored.interleaved,
        "shift": stored.shift,
        "is_negative_exponential": stored.is_negative_exponential,
        "rows": stored.rows,
    }
    return found | {name: value for name, value in seldom.items() if value}


def _write(folder: Path, files: dict[str, Any]) -> None:
    """Write the folder. It appears whole, also if several processes write it at once."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=".writing-", dir=folder.parent))
    try:
        for name, content in files.items():
            (scratch / name).write_text(json.dumps(content, ensure_ascii=False))
        try:
            scratch.rename(folder)
        except OSError:
            if not folder.is_dir():  # else another process was faster
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
