"""langchain-tests' standard suites for ChatOpenAI over both APIs, ChatAnthropic and OpenAIEmbeddings."""

from __future__ import annotations

import pathlib
from xml.etree import ElementTree

from .place import KEY, MODEL, OTHER_MODEL, Place, Report, failed_run
from .verdicts import Result

# LangChain keeps one asynchronous HTTP client for all models, so all tests must share an event loop.
OPTIONS = (
    "junit_family=xunit1",
    "asyncio_mode=auto",
    "asyncio_default_test_loop_scope=session",
    "asyncio_default_fixture_loop_scope=session",
)


def run(place: Place) -> Report:
    environment = place.environment("langchain")
    report = place.folder / "langchain.xml"
    module = pathlib.Path(__file__).parent / "langchain_standard.py"
    # --noconftest and an empty configuration: this repository's own are for its own tests.
    own = ("-c", "/dev/null", "--noconftest", "-p", "no:cacheprovider", "-W", "ignore", "-q")
    options = [part for option in OPTIONS for part in ("-o", option)]
    done = place.run(
        environment / "bin/python", "-m", "pytest", *own, *options, f"--junitxml={report}", module,
        env={
            "PEQUOD_URL": place.server.url,
            "PEQUOD_KEY": KEY,
            "PEQUOD_MODEL": MODEL,
            "PEQUOD_OTHER_MODEL": OTHER_MODEL,
        },
    )  # fmt: skip
    versions = place.versions(environment, "langchain-tests", "langchain-openai", "langchain-anthropic")
    if not report.exists():
        return Report(versions, [Result("the suite runs", "failed", failed_run(done))])
    return Report(versions, [Result("the suite runs", "passed"), *read(report)])


def read(report: pathlib.Path) -> list[Result]:
    """The results in a JUnit file; an error in a fixture is a failure."""
    return [_result(case) for case in ElementTree.parse(report).iter("testcase")]


def _result(case: ElementTree.Element) -> Result:
    name = f"{case.get('classname', '').rpartition('.')[2]}.{case.get('name')}"
    recorded = [entry.get("value", "") for entry in case.iter("property") if entry.get("name") == "statuses"]
    statuses = tuple(int(status) for status in recorded[0].split()) if recorded else None
    for tag, outcome in (("failure", "failed"), ("error", "failed"), ("skipped", "skipped")):
        found = case.find(tag)
        if found is not None:
            return Result(name, outcome, f"{found.get('message')}\n{found.text}", statuses)  # type: ignore[arg-type]
    return Result(name, "passed", statuses=statuses)
