"""The structures that Python passes to the kernels, and symbols that the kernels' variants must not share."""

import ctypes
import shutil
import subprocess

import pytest

from engine.kernels import build, library, structures

pytestmark = pytest.mark.skipif(build.supported() is not None, reason=build.supported() or "")


def test_structures_have_the_library_s_sizes():
    structures.check(library.load(build.library())[0])


def test_library_with_a_structure_of_another_size_is_refused(monkeypatch):
    class Other(structures.Progress):
        _fields_ = [("more", ctypes.c_int64)]

    changed = [Other if kind is structures.Progress else kind for kind in structures.STRUCTURES]
    monkeypatch.setattr(structures, "STRUCTURES", changed)
    with pytest.raises(ValueError, match="Other has 16 bytes in the library and 24 here"):
        structures.check(library.load(build.library())[0])


VARIANTS = {name: made for name, made in build.OBJECTS.items() if name.endswith("_avx2")}


@pytest.mark.skipif(build.compiler() is None or shutil.which("nm") is None, reason="needs a compiler and nm")
@pytest.mark.parametrize("name", VARIANTS)
def test_variants_have_no_weak_symbols(tmp_path, name):
    """The linker would merge a weak symbol, such as an instance of a standard template, across variants, and might keep
    the one with instructions that this processor lacks."""
    source, options = VARIANTS[name]
    target = tmp_path / f"{name}.o"
    command = [*build.compiler(), *build.OPTIONS, *options, "-c", str(build.HERE / source), "-o", str(target)]
    subprocess.run(command, check=True)
    listed = subprocess.run(["nm", "-C", str(target)], check=True, capture_output=True, text=True).stdout
    symbols = [line.split(maxsplit=2) for line in listed.splitlines() if not line.startswith(" ")]
    assert symbols
    assert [symbol for _, kind, symbol in symbols if kind in "WVu"] == []
