"""The compliance tests of the Open Responses project, from a checkout that OPEN_RESPONSES_DIR names."""

from __future__ import annotations

import json
import os
import pathlib
import re
import shutil
import subprocess
from typing import Any

from .place import KEY, MODEL, Place, Report, Unavailable, failed_run
from .verdicts import Result


def run(place: Place) -> Report:
    named = os.environ.get("OPEN_RESPONSES_DIR")
    if not named:
        raise Unavailable("OPEN_RESPONSES_DIR does not name a checkout of openresponses/openresponses")
    checkout = pathlib.Path(named)
    if not (checkout / "bin/compliance-test.ts").exists():
        raise Unavailable(f"OPEN_RESPONSES_DIR={named} has no bin/compliance-test.ts")
    modules = place.environment("openresponses") / "node_modules"
    # Imports are looked up from the file's own folder upwards, and a checkout need not have its packages installed.
    copy = place.folder / "openresponses"
    for part in ("bin", "src"):
        shutil.copytree(checkout / part, copy / part)
    (copy / "node_modules").symlink_to(modules.resolve())
    flags = ("--base-url", f"{place.server.url}/v1", "--api-key", KEY, "--model", MODEL, "--json")
    done = place.run(modules / ".bin/bun", copy / "bin/compliance-test.ts", *flags)
    return Report(f"openresponses {version(checkout)}", read(done))


def version(checkout: pathlib.Path) -> str:
    """The checkout's commit and its date, or the version of its package."""
    command = ["git", "-C", str(checkout), "log", "-1", "--format=%h (%cs)"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or str(json.loads((checkout / "package.json").read_text())["version"])


def read(done: subprocess.CompletedProcess[str]) -> list[Result]:
    """The results in the program's output; it exits with 1 when a test failed."""
    try:
        tests: list[dict[str, Any]] = json.loads(done.stdout)["results"]
    except (ValueError, KeyError):
        return [Result("the suite runs", "failed", failed_run(done))]
    return [Result("the suite runs", "passed"), *(_result(test) for test in tests)]


def _result(test: dict[str, Any]) -> Result:
    errors = "; ".join(test.get("errors") or ())
    statuses = [int(status) for status in re.findall(r"\bHTTP (\d{3})\b", errors)]
    if statuses:
        # The program prints the body of an error response as [object Object].
        errors = f"{errors} {json.dumps(test.get('response'))}"
    # The program looks at a response's content only after its status and its schema.
    elif "WebSocket" not in errors:
        statuses = [200]
    return Result(test["id"], test["status"], errors, tuple(statuses) or None)
