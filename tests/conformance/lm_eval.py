"""lm-eval against Pequod, compared with its own transformers backend on the same weights, tasks and numbers.

Only prompts as token ids are compared: lm-eval takes the continuation's first token to be the one after the tokens
that it counted itself, and a server adds the token that begins a text to prompts that are text.
"""

from __future__ import annotations

import json
import os
import pathlib
import shutil
from collections.abc import Callable
from typing import Any

import httpx

from .place import Place, Report, Unavailable, failed_run
from .verdicts import Result

MODEL = "stories260k"
# Both compute in float32, but sum in different orders.
TOLERANCE_PER_TOKEN = 1e-5
MAX_TOKENS = 48

# A beginning, its likely continuation, and an unlikely one.
STORIES = [
    ("Once upon a time, there was a little girl named", " Lily.", " stone."),
    ("Tom had a red ball. He liked to play with his", " ball.", " Why did the"),
    ("The dog was very happy. He ran to the", " park.", " was a he."),
    ('The cat gave Ben a fish. Ben said, "Thank', ' you!"', ' fish!"'),
    ("It was a sunny day. Sara and her mom went to the", " park.", " yes."),
    ("The bird wanted to fly. It was very", " sad.", " fly of."),
]
CHOICE, ROLLING, GENERATE = "pequod_choice", "pequod_rolling", "pequod_generate"


def run(place: Place) -> Report:
    data = os.environ.get("PEQUOD_TEST_DATA")
    source = pathlib.Path(data or "") / "models" / MODEL
    if not data or not source.is_dir():
        raise Unavailable(f"PEQUOD_TEST_DATA does not name a folder with models/{MODEL}")
    environment = place.environment("lm-eval")
    model = with_chat_template(source, place.folder / MODEL)
    tasks = place.folder / "tasks"
    write_tasks(tasks)
    server = place.start(str(model), "--dtype", "float32", "--served-model-name", MODEL)

    def samples(name: str, backend: str, arguments: dict[str, Any], *flags: str) -> dict[tuple[str, int], Any] | str:
        """One run of lm-eval: its samples by task and document, or what it printed when it failed."""
        output = place.folder / f"lm-eval-{name}-{backend}"
        given = ",".join(f"{key}={value}" for key, value in arguments.items())
        done = place.run(
            environment / "bin/lm-eval", "run", "--model", backend, "--model_args", given, "--include_path", tasks,
            "--log_samples", "--output_path", output, *flags,
            env={"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_DATASETS_CACHE": str(place.folder / "cache")},
        )  # fmt: skip
        return failed_run(done) if done.returncode else read(output)

    def tokens(text: str) -> int:
        body = {"model": MODEL, "prompt": text, "add_special_tokens": False}
        count: int = httpx.post(f"{server.url}/tokenize", json=body, timeout=60).raise_for_status().json()["count"]
        return count

    local = {"pretrained": model, "dtype": "float32", "add_bos_token": True}
    remote = {"model": MODEL, "num_concurrent": 4}
    completions = {
        **remote,
        "base_url": f"{server.url}/v1/completions",
        "tokenizer": model,
        "max_length": 512,
        "add_bos_token": True,
    }
    chat = {**remote, "base_url": f"{server.url}/v1/chat/completions"}
    results = []
    for backend, arguments, flags in (
        ("local-completions", completions, ("--tasks", f"{CHOICE},{ROLLING},{GENERATE}")),
        ("local-chat-completions", chat, ("--tasks", GENERATE, "--apply_chat_template")),
    ):
        expected = samples(backend, "hf", local, *flags, "--device", "cpu")
        measured = samples(backend, backend, arguments, *flags)
        for name, outcome in (("hf", expected), (backend, measured)):
            message = outcome if isinstance(outcome, str) else ""
            results.append(Result(f"{backend}: {name} runs", "failed" if message else "passed", message))
        if not isinstance(expected, str) and not isinstance(measured, str):
            results += [compare(backend, key, expected[key], measured.get(key), tokens) for key in sorted(expected)]
    return Report(place.versions(environment, "lm-eval", "transformers"), results)


def with_chat_template(source: pathlib.Path, target: pathlib.Path) -> pathlib.Path:
    """A copy of the model whose tokenizer has the chat template that lies beside it."""
    shutil.copytree(source, target, copy_function=shutil.copyfile)
    target.chmod(0o755)
    config = target / "tokenizer_config.json"
    template = (source / "chat_template.example.jinja").read_text()
    config.write_text(json.dumps({**json.loads(config.read_text()), "chat_template": template}))
    return target


def write_tasks(folder: pathlib.Path) -> None:
    """Three tasks over the stories: which of two continuations, a text's likelihood, and greedy generation."""
    folder.mkdir()
    rows = [{"context": context, "choices": [*choices], "answer": 0} for context, *choices in STORIES]
    texts = [{"text": f"{context}{likely} {'They were happy. ' * n}"} for n, (context, likely, _) in enumerate(STORIES)]
    files = {"stories": rows, "texts": texts}
    for name, lines in files.items():
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))

    def task(name: str, data: str, **more: Any) -> None:
        files = {"test": str(folder / f"{data}.jsonl")}
        given = {"task": name, "dataset_path": "json", "dataset_kwargs": {"data_files": files}, "test_split": "test"}
        # JSON is YAML.
        (folder / f"{name}.yaml").write_text(json.dumps({**given, **more}))

    task(
        CHOICE, "stories", output_type="multiple_choice", doc_to_text="{{context}}", doc_to_choice="{{choices}}",
        doc_to_target="{{answer}}", target_delimiter="", metric_list=[{"metric": "acc"}],
    )  # fmt: skip
    task(
        ROLLING, "texts", output_type="loglikelihood_rolling", doc_to_text="", doc_to_target="{{text}}",
        metric_list=[{"metric": "bits_per_byte"}],
    )  # fmt: skip
    task(
        GENERATE, "stories", output_type="generate_until", doc_to_text="{{context}}", doc_to_target="{{choices[0]}}",
        generation_kwargs={"until": ["\n\n"], "max_gen_toks": MAX_TOKENS, "do_sample": False, "temperature": 0.0},
        metric_list=[{"metric": "exact_match"}],
    )  # fmt: skip


def read(output: pathlib.Path) -> dict[tuple[str, int], Any]:
    """The samples that lm-eval logged, by task and document."""
    found = {}
    for path in output.rglob("samples_*.jsonl"):
        task = path.name.removeprefix("samples_").rpartition("_")[0]
        for line in path.read_text().splitlines():
            sample = json.loads(line)
            found[task, sample["doc_id"]] = sample
    return found


def compare(
    name: str,
    key: tuple[str, int],
    expected: dict[str, Any],
    measured: dict[str, Any] | None,
    tokens: Callable[[str], int],
) -> Result:
    """Whether both backends found the same for one document: likelihoods within the tolerance, or the same text.

    `tokens` counts a text's tokens.
    """
    task, document = key
    test = f"{name}: {task.removeprefix('pequod_')} {document}"
    if measured is None:
        return Result(test, "failed", "Pequod has no sample of it")
    differences = []
    for asked, [theirs], [ours] in zip(requests(expected), expected["resps"], measured["resps"], strict=True):
        if task == GENERATE:
            # transformers drops the space that begins a text when it decodes the new tokens alone.
            if ours not in (theirs, f" {theirs}"):
                differences.append(f"hf wrote {theirs!r}, Pequod {ours!r}")
            continue
        (ours_sum, *ours_greedy), (theirs_sum, *theirs_greedy) = map(likelihood, (ours, theirs))
        allowed = TOLERANCE_PER_TOKEN * tokens(asked[-1])
        if abs(ours_sum - theirs_sum) > allowed or ours_greedy != theirs_greedy:
            differences.append(f"hf {theirs}, Pequod {ours}, tolerance {allowed:.0e}")
    return Result(test, "failed" if differences else "passed", "; ".join(differences))


def requests(sample: dict[str, Any]) -> list[list[Any]]:
    """What each request of a sample asked: context and continuation, or the text alone."""
    return [[*asked.values()] for asked in sample["arguments"].values()]


def likelihood(response: Any) -> tuple[Any, ...]:
    """A response's sum of log-probabilities and, where it has one, whether its tokens were the likeliest."""
    if isinstance(response, str):
        return (float(response),)
    total, greedy = response
    return float(total), greedy
