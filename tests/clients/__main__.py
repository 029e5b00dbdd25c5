"""`make clients`: every client of the table against a live server; prints the table, exits with 1 on a failure."""

from __future__ import annotations

import argparse
import json
import pathlib
import signal
import sys
from typing import Any

from . import table
from .place import MODEL, Place


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.clients", description=__doc__)
    parser.add_argument("--python", help="the interpreter that has the server (default: this one)")
    parser.add_argument(
        "--model",
        default=MODEL,
        metavar="NAME_OR_FOLDER",
        help="the model to serve, of which only the form of the answers is checked, e.g. smollm2 after `pequod pull`"
        " (default: the built-in one, whose answers are known)",
    )
    parser.add_argument("--webui", type=pathlib.Path, metavar="PROGRAM", help="the program open-webui")
    parser.add_argument("--json", metavar="FILE", help="write every result there, with its seconds")
    parser.add_argument("--client", action="append", choices=table.CLIENTS, help="only this one; several times")
    parser.add_argument("--row", action="append", choices=table.ROWS, help="only this call; several times")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, terminate)
    columns = {}
    try:
        started = Place(options.python, options.webui, options.model)
    except AssertionError as error:  # with what the server says, e.g. that it knows no such model
        parser.exit(2, f"{error}\n")
    with started as place:
        for name in options.client or table.CLIENTS:
            absent = table.missing(table.client(name), place)
            if absent is None:
                columns[f"{table.CLIENTS[name]} {table.version(name, place)}"] = run(name, place, options.row)
            elif options.client:
                parser.error(f"{name} cannot run: {absent}")
            else:
                print(f"{name} is left out: {absent}", file=sys.stderr, flush=True)
    print(f"\n{table.markdown(columns)}")
    if options.json:
        pathlib.Path(options.json).write_text(json.dumps(written(columns), indent=1) + "\n")
    failed = [(heading, result) for heading, column in columns.items() for result in column.values() if result.failure]
    for heading, result in failed:
        print(f"\n{heading}, {table.ROWS[result.row]}: {result.failure}")
    return 1 if failed else 0


def terminate(*_: object) -> None:
    """End the process and with it its servers. A second signal must not disturb that."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(128 + signal.SIGTERM)


def run(name: str, place: Place, rows: list[str] | None) -> dict[str, table.Result]:
    """One client's column."""
    module = table.client(name)
    column = {}
    for result in table.results(module, place, [row for row in table.offered(module) if row in (rows or table.ROWS)]):
        column[result.row] = result
        print(f"{name} {result.row} {table.told(result)} {result.seconds:.1f} s", file=sys.stderr, flush=True)
    return column


def written(columns: dict[str, dict[str, table.Result]]) -> dict[str, Any]:
    """Results as JSON: per client and call ok or the failure; calls that a client does not offer are absent."""
    return {
        heading: {
            result.row: {"ok": result.failure is None, "failure": result.failure, "seconds": round(result.seconds, 3)}
            for result in column.values()
        }
        for heading, column in columns.items()
    }


if __name__ == "__main__":
    sys.exit(main())
