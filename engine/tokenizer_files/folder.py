"""Finds the tokenizer.json of a model folder, and makes it from other files where the folder has none."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

from ..files import read_file
from ..process import child_environment
from ..types import ModelError
from ..user_cache import cache_root, make_private, temporary_root

FILE = "tokenizer.json"
MAX_BYTES = 64 << 20  # of one file; the largest published vocabularies have about 35 MB
# Files that a tokenizer may be made from, and others that affect the result.
SOURCES = (
    "vocab.json", "merges.txt", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "vocab.txt",
    "tiktoken.model", "qwen.tiktoken", "tekken.json",
)  # fmt: skip
SETTINGS = ("added_tokens.json", "special_tokens_map.json", "tokenizer_config.json", "config.json")
FORMAT = 2  # version of the files that our converters write: raise it when a converter changes
CONVERT_TIMEOUT_S = 300.0  # importing transformers takes seconds, converting the largest vocabularies half a minute


def tokenizer_folder(folder: Path) -> Path:
    """Return the folder with the tokenizer.json of the model in `folder`: the same one, or one in the cache.

    The tokenizer_config.json of a folder in the cache has settings that the model's folder may lack, because older code
    has them as defaults. Raises ModelError if there is no tokenizer, or none that can be converted.
    """
    if os.path.exists(folder / FILE):  # pathlib raises for a folder that may not be read
        return folder
    if not any(os.path.isfile(folder / name) for name in SOURCES):
        raise ModelError(
            f"{folder} has no tokenizer: neither tokenizer.json nor files to make it from "
            "(vocab.json with merges.txt, tokenizer.model, tiktoken.model, or tekken.json)."
        )
    name = f"tokenizer-{_fingerprint(folder)}"
    try:
        return _converted(folder, cache_root() / name)
    except OSError:  # such as a read-only home
        pass
    try:
        make_private(temporary_root())
        return _converted(folder, temporary_root() / name)
    except OSError as error:
        raise ModelError(f"The tokenizer of {folder} cannot be written: {error.strerror or error}.") from None


def _converted(folder: Path, target: Path) -> Path:
    """Convert the tokenizer of `folder` to the folder `target`, unless that exists. Raises OSError and ModelError."""
    if not target.is_dir():
        target.parent.mkdir(parents=True, exist_ok=True)
        # The server and its engine need the file at the same time. One converts, which takes seconds and a gigabyte of
        # memory, and the other waits.
        with (target.parent / f"{target.name}.lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not target.is_dir():
                _convert(folder, target)
    return target


def _fingerprint(folder: Path) -> str:
    from importlib import metadata  # takes longer than the rest of this module, and few folders need it

    digest = hashlib.sha256(f"{FORMAT} {metadata.version('transformers')}".encode())
    for name in (*SOURCES, *SETTINGS):
        data = read_file(folder / name, MAX_BYTES)
        if data is not None:
            digest.update(f"\0{name}\0{len(data)}\0".encode())
            digest.update(data)
    return digest.hexdigest()[:32]


def _convert(folder: Path, target: Path) -> None:
    command = [sys.executable, "-m", "engine.tokenizer_files.convert", str(folder), str(target)]
    quiet = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "USE_TORCH": "0"}
    environment = child_environment() | quiet
    try:
        child = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=CONVERT_TIMEOUT_S,
            check=False,
            env=environment,
        )
    except subprocess.TimeoutExpired:
        raise ModelError(f"Converting the tokenizer of {folder} took over {CONVERT_TIMEOUT_S:.0f} s.") from None
    finally:
        # A child that was killed leaves its temporary folder. The caller holds the lock, so no other child needs one.
        for temporary in target.parent.glob(f"{target.name}-*"):
            shutil.rmtree(temporary, ignore_errors=True)
    if child.returncode != 0 or not os.path.isdir(target):
        lines = child.stderr.strip().splitlines()
        reason = lines[-1][:300].rstrip(".") if lines else f"exit status {child.returncode}"
        raise ModelError(f"The tokenizer files of {folder} cannot be converted: {reason}.")
