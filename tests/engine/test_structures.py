"""What Python and the kernels agree on, and what variants of the kernels must not share."""

import ctypes
import shutil
import subprocess

import pytest

from engine.kernels import build, library, structures

pytestmark = pytest.mark.skipif(build.supported() is not None, reason=build.supported() or "")


def test_the_library_has_the_same_structures():
    structures.check(library.load(build.library())[0])


def test_a_library_with_other_structures_is_refused(monkeypatch):
    class Other(structures.Progress):
        _fields_ = [("more", ctypes.c_int64)]

    handed = [Other if kind is structures.Progress else kind for kind in structures.HANDED]
    monkeypatch.setattr(structures, "HANDED", handed)
    with pytest.raises(ValueError, match="Other has 16 bytes in the library and 24 here"):
        structures.check(library.load(build.library())[0])


VARIANTS = {name: made for name, made in build.OBJECTS.items() if name.endswith("_avx2")}


@pytest.mark.skipif(build.compiler() is None or shutil.which("nm") is None, reason="needs a compiler and nm")
@pytest.mark.parametrize("name", VARIANTS)
def test_no_function_of_a_variant_could_be_taken_for_another_variant_s(tmp_path, name):
    """Of weak symbols, such as instances of templates of the standard library, the linker keeps one for all variants:
    perhaps that with instructions that this processor does not have."""
    source, options = VARIANTS[name]
    target = tmp_path / f"{name}.o"
    command = [*build.compiler(), *build.OPTIONS, *options, "-c", str(build.HERE / source), "-o", str(target)]
    subprocess.run(command, check=True)
    listed = subprocess.run(["nm", "-C", str(target)], check=True, capture_output=True, text=True).stdout
    symbols = [line.split(maxsplit=2) for line in listed.splitlines() if not line.startswith(" ")]
    assert symbols
    assert [symbol for _, kind, symbol in symbols if kind in "WVu"] == []
