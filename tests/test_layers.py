"""The rules of the architecture, held by looking at the code and at what a process has imported."""

import ast
import asyncio
import importlib
import pathlib
import re
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter

import pytest

import engine
from engine import EngineConfig, EngineRequest, LocalEngine, SamplingParams
from server import settings

ROOT = pathlib.Path(__file__).parent.parent
HEAVY = {"torch", "transformers"}
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
NO_TORCH = [
    "types", "config", "batch", "sequence", "prefix_cache", "waiting", "scheduler", "loop", "client", "channel", "hub",
    "files",
]  # fmt: skip
# The parts of server/, lowest first: a module imports only from its own part and from parts in lines above. What stands
# in one line knows nothing of its neighbours.
LAYERS = [
    {"version", "child", "parsers"},
    {"settings_values"},
    {"settings"},
    {"settings_sources"},
    {"http"},
    {"observability", "grammar", "tokenization"},
    {"loading"},
    {"state"},
    {"generation"},
    {"api"},
    {"app"},
    {"offline"},
    {"cli"},
    {"__main__"},
]


def imports(path: pathlib.Path) -> set[tuple[str, tuple[str, ...]]]:
    """(module, names) of every absolute import of a file, wherever it stands."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {(alias.name, ()) for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.add((node.module or "", tuple(alias.name for alias in node.names)))
    return found


def files(package: str) -> list[pathlib.Path]:
    return sorted((ROOT / package).rglob("*.py"))


def module(path: pathlib.Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def arrows(package: str) -> dict[str, set[str]]:
    """What each module of a package imports of its package, wherever the import stands, also for types alone."""
    paths = {module(path): path for path in files(package)}
    found: dict[str, set[str]] = {name: set() for name in paths}
    for name, path in paths.items():
        here = name.split(".") if path.stem == "__init__" else name.split(".")[:-1]
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.level:
                base = ".".join(here[: len(here) - node.level + 1] + ([node.module] if node.module else []))
                whole = {f"{base}.{alias.name}" for alias in node.names}
                found[name] |= {full if full in paths else base for full in whole}
    return found


def test_nothing_in_the_server_imports_upwards():
    rank = {part: level for level, parts in enumerate(LAYERS) for part in parts}
    below = {(importer.split(".")[1], name.split(".")[1]) for importer, names in arrows("server").items()
             for name in names if name != "server"}  # fmt: skip
    assert {part for arrow in below for part in arrow} <= set(rank), "a part has no layer"
    assert not [arrow for arrow in below if arrow[0] != arrow[1] and rank[arrow[0]] <= rank[arrow[1]]]


@pytest.mark.parametrize("package", ["engine", "server"])
def test_no_modules_import_each_other_in_a_circle(package):
    try:
        list(TopologicalSorter(arrows(package)).static_order())
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_a_running_engine_imports_no_bench():
    for importer, names in arrows("engine").items():
        if not importer.startswith("engine.bench"):
            assert not {name for name in names if name.startswith("engine.bench")}, importer


@pytest.mark.parametrize("package", ["engine", "server"])
def test_no_file_is_longer_than_one_sitting(package):
    code = [path for path in files(package) if path.name != "phrases.py"]  # a text
    assert not [path.name for path in code if len(path.read_text().splitlines()) > 450]


def test_the_engine_knows_nothing_of_the_server():
    assert not [p for p in files("engine") for module, _ in imports(p) if module.partition(".")[0] == "server"]


def test_the_server_takes_from_the_engine_only_what_it_exports():
    for path in files("server"):
        for module, names in imports(path):
            if module.partition(".")[0] == "engine":
                assert module == "engine", f"{path} reaches into {module}"
                assert set(names) <= set(engine.__all__), f"{path} takes {names}"


def test_the_server_imports_neither_torch_nor_transformers():
    for path in files("server"):
        assert not {module.partition(".")[0] for module, _ in imports(path)} & HEAVY, path


@pytest.mark.parametrize(
    "modules", [[f"engine.{name}" for name in NO_TORCH], ["engine", "server.app", "server.cli.commands.serve"]]
)
def test_no_torch_comes_in_by_a_detour(modules):
    code = f"import sys, {', '.join(modules)}; print([m for m in {sorted(HEAVY)} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.strip() == "[]"


def test_a_runner_needs_torch_numpy_and_msgspec_alone():
    """So that a machine with a GPU can measure it with hardly anything installed."""
    others = [
        "fastapi",
        "pydantic",
        "httpx",
        "transformers",
        "tokenizers",
        "safetensors",
        "huggingface_hub",
        "llguidance",
    ]
    code = f"""
import sys
sys.modules |= dict.fromkeys({others})  # their import fails
from engine.batch import Batch, Entered, Row
from engine.build import build
from engine.config import EngineConfig
from engine.types import SamplingParams
runner = build(EngineConfig(model="builtin", load_format="dummy", num_blocks=4)).runner
entered = Entered(1, SamplingParams(max_tokens=2), 2, [])
print(len(runner.launch(Batch(1, [Row(1, 0, [5, 6], [0], 1)], [entered])).sample().result().outcomes[0].token_ids))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.stdout.strip() == "1", done.stderr


def test_there_is_no_text_in_the_engine():
    words = {"tokenizers", "jinja2"}
    found = [p for p in files("engine") if {module.partition(".")[0] for module, _ in imports(p)} & words]
    names = [p.relative_to(ROOT).as_posix() for p in found]
    assert names == ["engine/builtin/train.py", "engine/tokenizer_files/convert.py"]


def test_the_engine_names_fields_and_no_flags():
    """The server knows how users spell a setting; a program that reads flags of its own may name them."""
    flags = re.compile("|".join(rf"{settings.flag(name)}(?![\w-])" for name in settings.ENGINE_SETTINGS.values()))
    for path in files("engine"):
        if path.parent.name == "builtin":  # what the built-in model was trained to say is data
            continue
        tree = ast.parse(path.read_text())
        own = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and ast.unparse(n.func).startswith("parser.")]
        docs = [n.body[0] for n in ast.walk(tree) if isinstance(n, DOCUMENTED) and ast.get_docstring(n)]
        skipped = {id(part) for n in own + docs for part in ast.walk(n)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in skipped:
                assert not flags.search(node.value), f"{path}:{node.lineno} names a flag: {node.value}"


def test_every_field_that_the_engine_names_has_a_flag():
    fields = set(EngineConfig.__struct_fields__)
    assert set(settings.ENGINE_SETTINGS) <= fields
    assert set(settings.ENGINE_SETTINGS.values()) <= set(settings.FIELDS)
    # What the engine alone sets: for tests, and for a restart.
    assert fields - set(settings.ENGINE_SETTINGS) == {"debug", "num_snapshots", "products", "rope_len"}
    named = [(path, found) for path in files("engine") for found in settings.NAMED.finditer(path.read_text())]
    named = [(path, found[1]) for path, found in named if found[1] in fields]
    assert len(named) > 15 and {name for _, name in named} <= set(settings.ENGINE_SETTINGS)


@pytest.mark.parametrize("package", ["engine", "server"])
def test_no_module_keeps_state_that_changes(package):
    """Two engines and two apps in one process work only when nothing is shared by accident."""
    for path in files(package):
        tree = ast.parse(path.read_text())
        assert not [n for n in ast.walk(tree) if isinstance(n, ast.Global)], f"{path} has a global statement"
        for node in tree.body:
            target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
            if isinstance(node, (ast.Assign, ast.AnnAssign)) and isinstance(target, ast.Name):
                value = node.value
                empty = isinstance(value, (ast.List, ast.Dict)) and not (
                    value.elts if isinstance(value, ast.List) else value.keys
                )
                assert not empty, f"{path}: {target.id} starts empty, so something fills it"


async def test_two_engines_in_one_process_do_not_disturb_each_other():
    async def tokens(engine: LocalEngine, prompt: tuple[int, ...]) -> list[int]:
        params = SamplingParams(max_tokens=12, temperature=0.0)
        request = EngineRequest(id=1, prompt_ids=prompt, params=params)
        return [token async for delta in engine.generate(request) for token in delta.token_ids]

    config = EngineConfig(model="builtin", num_blocks=32, debug=True)
    async with LocalEngine(config) as one, LocalEngine(config) as two:
        alone = [await tokens(one, (5, 6, 7)), await tokens(two, (8, 9))]
        both = await asyncio.gather(tokens(one, (5, 6, 7)), tokens(two, (8, 9)))
        assert both == alone


def test_what_the_benchmarks_import_exists() -> None:
    # No other check imports them, and mypy does not read them.
    missing = []
    for path in sorted((ROOT / "benchmarks").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in ("server", "engine", "pequod"):
                module = importlib.import_module(node.module or "")
                missing += [f"{path.name}: {node.module}.{a.name}" for a in node.names if not hasattr(module, a.name)]
    assert not missing
