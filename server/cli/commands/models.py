"""`pequod models`: lists the models on this machine, and whether they can be served."""

from __future__ import annotations

import argparse
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from ..banner import size
from . import Failure, Parser, add_settings, settings_from, warn
from .doctor import cache_folder
from .plan import make

CHILDREN = 2  # concurrent plans; each is a child process that imports torch


def add_arguments(parser: Parser) -> None:
    parser.usage = "pequod models [flags]"
    parser.description = (
        "List the models on this machine: the built-in one, those of packages (`pequod pull`), and those in the Hugging"
        " Face cache, and which can be served."
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_settings(parser, "engine", model=False)


def run(arguments: argparse.Namespace) -> int:
    """Print a line for each model."""
    from engine import packaged_models

    config = settings_from(arguments).settings.engine_config()

    def examine(local: tuple[str, Path, int]) -> dict[str, Any]:
        name, folder, num_bytes = local
        problem = "" if name in packaged_models() else missing(folder)
        if not problem:
            try:
                code, plan = make(replace(config, model=str(folder), revision=None))
                problem = str(plan.get("error", "cannot be served")) if code else ""
            except Failure as error:
                problem = str(error)
        facts = {"name": name, "architecture": architecture(folder), "bytes": num_bytes, "folder": str(folder)}
        return facts | {"problem": problem, "can_serve": not problem}

    local, problem = local_models(), ""
    try:
        local += hub_models()
    except OSError as error:
        problem = f"the Hugging Face cache {cache_folder()} cannot be read: {error.strerror}"
        warn(problem)
    with ThreadPoolExecutor(CHILDREN) as pool:
        found = list(pool.map(examine, local))
    if arguments.json:
        print(json.dumps({"models": found, "cache": str(cache_folder())}, ensure_ascii=False))
        return 0
    names, kinds = (max(len(model[fact]) for model in found) for fact in ("name", "architecture"))
    for model in found:
        verdict = f"no: {model['problem']}" if model["problem"] else f"pequod serve {model['name']}"
        print(f"{model['name']:<{names}}  {model['architecture']:<{kinds}}  {size(model['bytes']):>9}  {verdict}")
    if not problem and not {model["name"] for model in found} - {"builtin", *packaged_models()}:
        print(f"The Hugging Face cache {cache_folder()} has no models; `pequod serve NAME` downloads one.")
    return 0


def local_models() -> list[tuple[str, Path, int]]:
    """Return name, folder and size of the built-in model and those of packages."""
    from engine import fetch, packaged_models

    folder = fetch("builtin", None, weights=True).path
    found = [("builtin", folder, sum(path.stat().st_size for path in folder.iterdir() if path.is_file()))]
    for name, file in packaged_models().items():
        found.append((name, fetch(name, None, weights=True).path, file.stat().st_size))
    return found


def hub_models() -> list[tuple[str, Path, int]]:
    """Return those in the Hugging Face cache, sorted by name. Raises OSError if it cannot be read."""
    if not cache_folder().is_dir():
        return []
    from huggingface_hub import scan_cache_dir

    found = []
    for repo in sorted(scan_cache_dir(cache_folder()).repos, key=lambda repo: repo.repo_id):
        revisions = sorted(repo.revisions, key=lambda revision: revision.last_modified)
        if repo.repo_type == "model" and revisions:
            # The revision that would be served: main, else the newest.
            served = next((revision for revision in revisions if "main" in revision.refs), revisions[-1])
            found.append((repo.repo_id, Path(served.snapshot_path), served.size_on_disk))
    return found


def missing(folder: Path) -> str:
    """Return which necessary files a model's folder lacks; an empty string if none."""
    from engine import LIST_BYTES, ModelError, read_json

    if not (folder / "config.json").is_file():
        return "no config.json: not a language model, or not downloaded completely"
    if not any(folder.glob("*.safetensors")):
        return "no *.safetensors weights were downloaded"
    if (folder / "model.safetensors").is_file():  # used though there may be an index
        return ""
    try:
        index = read_json(folder / "model.safetensors.index.json", LIST_BYTES)
        files = set() if index is None else {str(name) for name in index["weight_map"].values()}
    except (ModelError, KeyError, AttributeError):
        return "the index of its weights cannot be read"
    absent = [name for name in files if not (folder / name).is_file()]
    return f"{len(absent)} of {len(files)} weight files were not downloaded" if absent else ""


def architecture(folder: Path) -> str:
    """Return the model's architecture as named in config.json."""
    from engine import ModelError, read_json

    try:
        config = read_json(folder / "config.json") or {}
        return str(config["architectures"][0])[:64]
    except (ModelError, KeyError, IndexError, TypeError):
        return "unknown"
