"""`python -m engine.tokenizer_files.convert SOURCE TARGET`: converts other tokenizer files to tokenizer.json.

A process of its own, because transformers, which reads most of the older formats, takes time and memory to import.
"""

from __future__ import annotations

import contextlib
import importlib.util
import resource
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from . import tekken, tiktoken_model
from .folder import FILE

MAX_BYTES = 8 << 30  # of address space: the largest vocabularies need 1 GiB, and libraries reserve more


def main(source: Path, target: Path) -> None:
    """Convert the tokenizer of the folder `source` into the new folder `target`, or exit with a one-line reason."""
    with contextlib.suppress(ValueError, OSError):  # the limit is lower already, or the system is macOS
        resource.setrlimit(resource.RLIMIT_AS, (MAX_BYTES, resource.getrlimit(resource.RLIMIT_AS)[1]))
    convert = converter_for(source)
    needed = [name for name in ("sentencepiece", "google.protobuf") if not _has(name)]
    if needed and convert is _by_transformers and any(source.glob("*.model")):
        sys.exit("a sentencepiece model needs two more packages: pip install sentencepiece protobuf")
    folder = Path(tempfile.mkdtemp(prefix=f"{target.name}-", dir=target.parent))
    try:
        convert(source, folder)
        _check(folder)
        folder.rename(target)  # readers see the complete folder or none
    except MemoryError:
        sys.exit(f"they need more than {MAX_BYTES >> 30} GiB of memory")
    except Exception as error:
        if not target.is_dir():  # otherwise another process has converted it
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            # A first line that ends with a colon introduces a list of internals.
            sys.exit(
                lines[0] if lines and not lines[0].endswith(":") else "they are incomplete or of an unknown format"
            )
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def converter_for(source: Path) -> Callable[[Path, Path], None]:
    """Return the function that converts the files of a folder."""
    for module in (tiktoken_model, tekken):
        if (source / module.FILE).is_file():
            return module.convert
    return _by_transformers


def _by_transformers(source: Path, target: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source, local_files_only=True, trust_remote_code=False)
    if not hasattr(tokenizer, "backend_tokenizer"):
        raise ValueError(f"{type(tokenizer).__name__} cannot be written as a tokenizer.json")
    tokenizer.save_pretrained(target)


def _check(folder: Path) -> None:
    """Raise an error for files that cannot be read, such as those with a pattern that is no regular expression."""
    from tokenizers import Tokenizer

    Tokenizer.from_file(str(folder / FILE))


def _has(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # the parent package is missing
        return False


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
