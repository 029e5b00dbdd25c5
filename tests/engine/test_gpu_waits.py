"""Kernels that are launched before the one before has ended read no result of it before they wait.

No test without a GPU runs two kernels at once, and on a GPU the wrong order is seldom seen: so the source is read.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Of a step, and tables of the model: no kernel that may still run writes them.
INPUTS = {"work_ptr", "starts_ptr", "lengths_ptr", "table_ptr", "positions_ptr", "slots_ptr"}
SEGMENTS = {"row_start_ptr", "begin_ptr", "source_ptr", "target_ptr"}  # inputs, too
WEIGHTS = {"weight_ptr", "words_ptr", "angles_ptr", "q_scales_ptr", "skip_ptr"}
# The kernel before writes to it, through the second-level cache: what has been brought there is not out of date.
CACHE = {"cache_ptr", "matrices_ptr"}


def kernels(source: str) -> Iterator[ast.FunctionDef]:
    """Yield the functions that may be launched before the kernel before has ended."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef) and "DEPENDENT" in {each.arg for each in node.args.args}:
            yield node


def called(node: ast.Call) -> str:
    return ast.unparse(node.func)


def line_of(kernel: ast.FunctionDef, name: str) -> int:
    """Return the line of the only call of a function."""
    (line,) = (each.lineno for each in ast.walk(kernel) if isinstance(each, ast.Call) and called(each) == name)
    return line


def early_of(kernel: ast.FunctionDef) -> set[str]:
    """Return the pointers that a kernel may read from before it waits."""
    own = {each.arg for each in kernel.args.args}
    # With these names a product has its weight, and a layer that keeps states what the kernel before has computed.
    numbers = set() if own & SEGMENTS else {"numbers_ptr"}
    return INPUTS | SEGMENTS | WEIGHTS | numbers


def objections(kernel: ast.FunctionDef) -> list[str]:
    """Return what a kernel does before it waits, though it must not."""
    wait = line_of(kernel, "gdc_wait")
    early = sorted(
        (each for each in ast.walk(kernel) if isinstance(each, ast.Assign | ast.Call) and each.lineno < wait),
        key=lambda each: each.lineno,
    )
    origins: dict[str, set[str]] = {}  # the pointers that a variable's value comes from

    def pointers(node: ast.AST) -> set[str]:
        names = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
        return {name for name in names if name.endswith("_ptr")}.union(*(origins.get(name, ()) for name in names))

    found = [] if line_of(kernel, "gdc_launch_dependents") > wait else ["it lets the next kernel start"]
    for each in early:
        if isinstance(each, ast.Assign):
            for target in ast.walk(each.targets[0]):
                if isinstance(target, ast.Name):
                    origins[target.id] = origins.get(target.id, set()) | pointers(each.value)
            continue
        name = called(each)
        if name == "prefetch":
            is_allowed = pointers(each) <= early_of(kernel) | CACHE
        elif name in ("tl.load", "prefetch_near"):
            is_allowed = pointers(each) <= early_of(kernel)
        elif "." in name:
            is_allowed = not name.startswith(("tl.store", "tl.atomic"))
        else:  # another function may read what it is given
            is_allowed = bool(pointers(each)) and pointers(each) <= early_of(kernel)
        if not is_allowed:
            found.append(ast.unparse(each))
    return found


FOUND = [
    (path.stem, each) for path in sorted(ROOT.glob("engine/kernels/gpu/*.py")) for each in kernels(path.read_text())
]


@pytest.mark.parametrize("kernel", [each for _, each in FOUND], ids=[f"{file}.{each.name}" for file, each in FOUND])
def test_before_it_waits_a_kernel_reads_weights_and_inputs_alone(kernel):
    assert objections(kernel) == []


def first_load(name: str) -> int:
    """Return how many lines before its wait a kernel has loaded something."""
    ((kernel,),) = [[each for _, each in FOUND if each.name == name]]
    loads = ("tl.load", "find_rows", "prefetch", "prefetch_near")
    lines = [each.lineno for each in ast.walk(kernel) if isinstance(each, ast.Call) and called(each) in loads]
    return line_of(kernel, "gdc_wait") - min(lines)


@pytest.mark.parametrize("name", ["choose", "store", "convolve", "convolve_gated", "recur", "scan"])
def test_what_is_known_before_a_kernel_waits_is_read_then(name):
    assert first_load(name) > 0


def test_there_are_kernels_that_wait():
    assert {"attend", "rotate_store", "store", "add_norm", "gate", "multiply", "find_top"} <= {
        each.name for _, each in FOUND
    }


@pytest.mark.parametrize(
    "early, says",
    [
        ("x = tl.load(x_ptr + 1)", ["tl.load(x_ptr + 1)"]),
        ("at = x_ptr + 1\n    x = tl.load(at)", ["tl.load(at)"]),
        ("row = tl.load(work_ptr)\n    x = tl.load(x_ptr + row)", ["tl.load(x_ptr + row)"]),
        ("tl.store(work_ptr, 0)", ["tl.store(work_ptr, 0)"]),
        ("x = top_of(x_ptr)", ["top_of(x_ptr)"]),
        ("prefetch(x_ptr)", ["prefetch(x_ptr)"]),
        ("prefetch_near(cache_ptr)", ["prefetch_near(cache_ptr)"]),
        ("x = tl.load(cache_ptr)", ["tl.load(cache_ptr)"]),
        (
            "gdc_launch_dependents()\n    prefetch(weight_ptr)",
            ["it lets the next kernel start", "gdc_launch_dependents()"],
        ),
        ("row = tl.load(work_ptr)\n    prefetch(weight_ptr + row)", []),
        ("x = tl.load(weight_ptr)\n    prefetch(cache_ptr)", []),
        ("x = rows_of(weight_ptr)", []),
    ],
)
def test_what_reads_too_early_is_found(early, says):
    later = "" if "dependents" in early else "\n    gdc_launch_dependents()"
    source = f"def f(x_ptr, work_ptr, weight_ptr, cache_ptr, DEPENDENT):\n    {early}\n    gdc_wait(){later}\n"
    assert [objections(each) for each in kernels(source)] == [says]
