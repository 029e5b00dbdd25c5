"""The examples of the README and of docs/api.md are run as they stand."""

import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def blocks(language: str, text: str = README) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, re.S)


def run(command: list[str], text: str | None = None) -> str:
    done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=120, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def local(example: str, port: int) -> str:
    """Return an example for the tests' server, which has the built-in model."""
    return example.replace("127.0.0.1:8000", f"127.0.0.1:{port}").replace("smollm2", "builtin")


def test_the_curl_example_answers(server):
    (block,) = blocks("bash")
    block = block.replace("What is the capital of France?", "What is 7 + 5?")
    assert "12" in run(["bash", "-c", local(block, server.port)])


def test_the_python_examples_print_something_sensible(server):
    sdk, library = blocks("python")
    assert "batch" in run([sys.executable, "-"], local(sdk, server.port))
    assert "12" in run([sys.executable, "-"], library).splitlines()[0]


def test_the_example_of_embeddings_prints_a_similarity(server):
    (example,) = blocks("python", (ROOT / "docs/api.md").read_text())
    printed = run([sys.executable, "-"], example.replace("127.0.0.1:8000", f"127.0.0.1:{server.port}"))
    assert -1 <= float(printed) <= 1


def test_the_readme_is_short():
    assert len(README.splitlines()) <= 150


def test_the_first_lines_name_the_two_commands_and_the_makefile_has_them():
    commands = re.findall(r"^    make ([\w-]+)", README, re.M)
    assert commands[:2] == ["serve", "test"]
    makefile = (ROOT / "Makefile").read_text()
    assert all(re.search(rf"^{target}:", makefile, re.M) for target in commands)
