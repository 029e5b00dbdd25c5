"""benchmarks/compare.py: what it reads, what it writes, and one whole run between two servers that are there."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import compare
from benchmarks.contestants import Contestant, Elsewhere, Peer, enter, read_peers
from engine import Roofline
from server.cli.bench.client import Shot
from server.cli.bench.load import Run
from server.cli.commands import Failure, UsageError
from tests.live import Server
from tests.server.cli.bench.test_client import Other

ROOT = Path(__file__).parent.parent


# Stands for benchmarks/openvino_driver.py: what it answers is told on its command line.
DRIVER = """
import json, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.answer(200, {"version": "7.8"})
    def do_POST(self):
        work = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if sys.argv[2] == "fails" or work["sampling"] != {"top_k": 20}:
            return self.answer(500, {"error": "no memory"})
        one = {"sent": 1.0, "times": [1.5, 1.5 + 0.25 * work["at_once"]], "sizes": [1, work["output_lens"][0] - 1]}
        self.answer(200, {"answers": [one] * len(work["prompts"])})
    def answer(self, status, told):
        content = json.dumps(told).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)
HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def read(tmp_path: Path, text: str, only: tuple[str, ...] = ()) -> list[Peer]:
    path = tmp_path / "peers.toml"
    path.write_text(text)
    return read_peers(path, {"model": "/models/a b", "root": "/r"}, only)


async def entered(peer: Peer, then):
    """What `then` gives for a peer that has been started."""
    async with contextlib.AsyncExitStack() as stack:
        return await then(await enter(stack, peer, (), seed=1))


def test_a_peer_is_read_and_its_places_are_filled(tmp_path, monkeypatch):
    monkeypatch.setenv("GGUF", "/x.gguf")
    (peer,) = read(
        tmp_path,
        '[[server]]\nname = "a"\ncommand = "run {model} -m $GGUF --port {port}"\n'
        'env = { N = "{root}/n" }\nrounds = 2\n',
    )
    assert peer.command == ("run", "/models/a b", "-m", "/x.gguf", "--port", "{port}")
    assert peer.env == {"N": "/r/n"}
    assert peer.shown == "run {model} -m $GGUF --port {port}"
    assert peer.rounds == 2
    assert (peer.ready, peer.api, peer.url) == ("/health", "completions", None)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "must hold"),
        ("[[server]", "cannot be read"),
        ("x = 1\n[[server]]\nname = 'a'\nurl = 'b'", "and nothing else"),
        ("[[server]]\nname = 'a'", "needs a name, and a command or a url"),
        ("[[server]]\nname = 'a'\ncommand = 'x'\nurl = 'y'", "a command or a url"),
        ("[[server]]\nurl = 'y'", "needs a name"),
        ("[[server]]\nname = 'a'\nurl = 'y'\nprot = 'z'", "'prot', which is none of"),
        ("[[server]]\nname = 'a'\nurl = 3", "url must be text"),
        ("[[server]]\nname = 'a'\nurl = 'y'\nenv = 'x'", "env must be a table of texts"),
        ("[[server]]\nname = 'a'\nurl = 'y'\nenv = { A = 1 }", "env must be a table of texts"),
        ("[[server]]\nname = 'a'\nurl = 'y'\nrounds = 0", "rounds must be a number from 1"),
        ("[[server]]\nname = 'a'\nurl = 'y'\nrounds = true", "rounds must be a number from 1"),
        ("[[server]]\nname = 'a'\nurl = 'y'\n[[server]]\nname = 'a'\nurl = 'z'", "two servers have one name"),
    ],
)
def test_a_broken_file_of_peers_says_where(tmp_path, text, said):
    with pytest.raises(UsageError) as error:
        read(tmp_path, text)
    assert said in str(error.value)


def test_servers_are_chosen_by_name(tmp_path):
    text = '[[server]]\nname = "a"\nurl = "x"\n[[server]]\nname = "b"\nurl = "y"\n'
    assert [peer.name for peer in read(tmp_path, text, ("a",))] == ["a"]
    with pytest.raises(UsageError, match="has no server 'c'; it has a, b"):
        read(tmp_path, text, ("a", "c"))


async def test_a_server_without_its_variables_is_not_started_and_says_which(tmp_path, monkeypatch):
    monkeypatch.setenv("SET", "/x")
    for name in ("NOT_SET", "NOR_THIS"):
        monkeypatch.delenv(name, raising=False)
    text = 'name = "a"\ncommand = "$NOT_SET $SET ${NOT_SET} {port}"\nenv = { A = "${NOR_THIS}:b" }\nnote = "$5"\n'
    (peer,) = read(tmp_path, "[[server]]\n" + text)
    assert peer.missing == ("NOT_SET", "NOR_THIS")

    async def then(found: Contestant):
        return found.failure

    assert await entered(peer, then) == "not started: $NOT_SET, $NOR_THIS not set"


def test_the_committed_peers_are_read(monkeypatch):
    names = (
        "GGUF GGUF_Q8 LLAMA_SERVER OPENVINO_INT8 OPENVINO_MODEL OPENVINO_PYTHON TRANSFORMERS VLLM_PRELOAD VLLM_PYTHON"
    )
    for name in names.split():
        monkeypatch.setenv(name, "/x")
    peers = read_peers(ROOT / "benchmarks/peers.toml", {"model": "m", "python": "/p", "root": str(ROOT)})
    assert peers[0].name == "Pequod"
    assert all("{port}" in " ".join(peer.command) for peer in peers)
    assert not any(peer.missing or str(ROOT) in peer.shown for peer in peers)
    drivers = [peer for peer in peers if peer.api == "in-process"]
    assert len(drivers) == 2
    assert all(Path(peer.command[1]).is_file() for peer in drivers)


def test_a_peer_takes_part_in_its_cases_and_rounds():
    assert Peer("a").takes_part("S", 9)
    some = Peer("a", cases="AC", rounds=2)
    taken = [(case, number) for case in "ABC" for number in range(-1, 4) if some.takes_part(case, number)]
    assert taken == [(case, number) for case in "AC" for number in (-1, 0, 1)]


async def test_a_driver_runs_whole_workloads_and_its_times_are_taken():
    async def then(driver: Contestant):
        asks = driver.asks(3, 8, 5, "p", 6, sampling={"top_k": 20})
        return driver, asks, await driver.run(asks, 2)

    command = (sys.executable, "-c", DRIVER, "{port}", "works")
    driver, asks, done = await entered(Peer("d", command, api="in-process"), then)
    assert driver.failure is None
    assert driver.version == "7.8"
    assert len({tuple(ask.prompt[:6]) for ask in asks}) == 1
    assert len({tuple(ask.prompt) for ask in asks}) == 3
    assert [shot.tokens for shot in done.shots] == [5] * 3
    assert [shot.prompt_tokens for shot in done.shots] == [8] * 3
    assert done.shots[0].decode_rate == 4 / 0.5
    assert done.wall == 1.0


async def test_a_driver_that_fails_says_why():
    async def then(driver: Contestant):
        with pytest.raises(Failure) as error:
            await driver.run(driver.asks(1, 8, 5, "p", 0, sampling={}), 1)
        return str(error.value)

    command = (sys.executable, "-c", DRIVER, "{port}", "fails")
    assert await entered(Peer("d", command, api="in-process"), then) == "the driver failed: no memory"


async def test_a_proxy_of_the_environment_stands_before_no_peer_that_is_started(monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    given = []

    async def connect(url, *_, is_own):
        given.append(is_own)
        raise Failure("seen")

    async def then(peer: Contestant):
        return peer.failure

    command = (sys.executable, "-c", DRIVER, "{port}", "works")
    assert await entered(Peer("d", command, api="in-process"), then) is None
    monkeypatch.setattr("benchmarks.contestants.connect", connect)
    assert await entered(Peer("a", command), then) == "did not start: seen"
    assert await entered(Peer("b", url="http://sea"), then) == "did not start: seen"
    assert given == [True, False]


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (("/no/such/program", "{port}"), "did not start: /no/such/program cannot be started"),
        ((sys.executable, "-c", "print('no AMX here'); raise SystemExit(3)"), "the server ended with code 3; "),
    ],
)
async def test_a_peer_that_cannot_be_started_is_reported_as_such(command, said):
    async def then(peer: Contestant):
        return peer

    peer = await entered(Peer("a", command), then)
    assert said in peer.failure
    assert (peer.target, peer.child) == (None, None)


async def test_a_peer_that_takes_text_alone_needs_words_of_one_token():
    async def then(peer: Contestant):
        return peer.failure

    with Other(takes_ids=False).listening() as url:
        assert "no words that are one token" in await entered(Peer("a", url=url), then)
    with Other(takes_ids=True).listening() as url:
        assert await entered(Peer("a", url=url), then) is None


def test_the_work_of_a_measured_server_is_not_elsewhere(monkeypatch):
    spent = iter([1.0, 5.0])
    server = Contestant(Peer("a"))
    assert Elsewhere(server).cores() is None  # it was not started here
    monkeypatch.setattr(Contestant, "process_seconds", property(lambda _: next(spent)))
    monkeypatch.setattr("benchmarks.contestants.busy_seconds", iter([10.0, 14.0]).__next__)
    monkeypatch.setattr("time.process_time", lambda: 0.0)
    assert Elsewhere(server).cores() == 0


async def test_no_round_begins_that_would_end_too_late(monkeypatch):
    now, turns = [0.0], []

    async def turn(each, name, case, number, limits):
        turns.append((number, name, each.peer.name, case.output_len))
        now[0] += 200 if name == "S" else 50
        return ""

    monkeypatch.setattr(compare, "turn", turn)
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    everyone = [Contestant(Peer("a")), Contestant(Peer("b", cases="A")), Contestant(Peer("c"), failure="broken")]
    arguments = SimpleNamespace(rounds=9, minutes=10, cases="AS")
    kept = []
    await compare.measure(everyone, arguments, None, lambda: kept.append(len(turns)))
    # 100 s of warm-up, 300 s of the first round with S, and of 100 s each as many as fit into 600.
    assert kept == [2, 4, 5, 7, 9]
    assert turns[:5] == [
        (-1, "A", "a", 32),
        (-1, "A", "b", 32),
        (0, "A", "a", 128),
        (0, "A", "b", 128),
        (0, "S", "a", 64),
    ]
    assert [(number, name) for number, _, name, _ in turns[5:]] == [(1, "b"), (1, "a"), (2, "a"), (2, "b")]


class Limits:
    """A machine whose bandwidth is told: first the probe before a turn, then the one after it."""

    dtype = "bfloat16"

    def __init__(self, *speeds: float) -> None:
        shape = dict.fromkeys(Roofline.__struct_fields__, 0) | {"weights_bytes": 1000, "kv_bytes_per_token": 10}
        self.all = [Roofline(**shape | {"bytes_per_s": speed}) for speed in speeds]
        self.seen = self.all[:1]

    async def measure(self) -> Roofline:
        self.seen.append(self.all[min(len(self.seen), len(self.all) - 1)])
        return self.seen[-1]


async def turned(monkeypatch, each: Contestant, case: str, answers: dict, limits: Limits | None = None) -> None:
    """Turns in rounds of a case as long as it takes part, by number: each answer is shots, or what is raised."""
    left = iter(answers.values())

    async def run(*_):
        answer = next(left)
        if isinstance(answer, Exception):
            raise answer
        return Run(answer, 2.0)

    async def answers_still():
        return True

    monkeypatch.setattr(compare, "SETTLE_S", 0)
    monkeypatch.setattr(Contestant, "asks", lambda *_, **__: [])
    monkeypatch.setattr(Contestant, "run", run)
    each.target = SimpleNamespace(is_alive=answers_still)
    for number in answers:
        if each.failure is None:
            await compare.turn(each, case, compare.CASES[case], number, limits or Limits(1.0))


async def test_requests_are_greedy_in_every_case_but_p():
    """The sampling fields reach the server, and no other case sends them."""
    other = Other()

    async def then(each: Contestant):
        sent = {}
        for name, case in compare.CASES.items():
            other.bodies.clear()
            await each.run(each.asks(1, 8, 2, name, 0, sampling=case.sampling), 1)
            fields = ("temperature", "top_p", "top_k")
            sent[name] = {field: body[field] for body in other.bodies for field in fields if field in body}
        return sent

    with other.listening() as url:
        sent = await entered(Peer("a", url=url), then)
    assert sent.pop("P") == {"temperature": 0.7, "top_p": 0.9, "top_k": 20}
    assert set(sent) == set("ABCDS") and all(fields == {"temperature": 0} for fields in sent.values())


def shot(tokens: int = 128, error: str | None = None) -> Shot:
    """Tokens at equal distances, 20 of them a second."""
    times = [] if error else [1 + n / 20 for n in range(tokens)]
    return Shot(0.0, 32, tokens, sent=0.0, done=9.0, times=times, error=error)


async def test_the_share_of_bandwidth_is_of_the_probes_around_the_turn(monkeypatch):
    each = Contestant(Peer("a"))
    await turned(monkeypatch, each, "A", {0: [shot()]}, Limits(100e3, 60e3))
    figures = each.rounds["A"][0]
    assert figures["bytes_per_s"] == 80e3
    # 20 steps a second, of which each reads all weights and on average 32 + 64 cached tokens.
    assert figures["bandwidth_share"] == pytest.approx(20 * (1000 + 96 * 10) / 80e3)
    other = Contestant(Peer("b", weights="int8"))
    await turned(monkeypatch, other, "A", {0: [shot()]})
    assert "bandwidth_share" not in other.rounds["A"][0]


async def test_the_time_per_token_is_not_that_between_chunks(monkeypatch, tmp_path):
    each = Contestant(Peer("a"))
    burst = shot()
    burst.times = [1 + n // 2 / 10 for n in range(128)]  # two tokens arrive at a time
    await turned(monkeypatch, each, "A", {0: [burst]})
    each.rounds["A"][0]["elsewhere_cores"], each.target.notes = 0.0, []
    arguments = SimpleNamespace(model="/models/m", cases="A", out=tmp_path)
    assert "| 20.0 (50.0) |" in compare.markdown(compare.write(arguments, [each], Limits(1e9)))


async def test_a_turn_with_lost_requests_has_no_figures_and_a_second_one_ends_it(monkeypatch):
    each = Contestant(Peer("a"))
    good, bad = [shot(), shot()], [shot(), shot(error="too busy")]
    await turned(monkeypatch, each, "C", {0: good, 1: bad, 2: good})
    assert list(each.rounds["C"]) == [0, 2]
    assert each.lost == ["failed in case C, round 2: 1 of 16 requests were not answered: too busy"]
    assert each.failure is None
    await turned(monkeypatch, each, "C", {3: Failure("no request was answered: too busy"), 4: good})
    assert list(each.rounds["C"]) == [0, 2]
    assert each.failure == "failed in case C, round 4: no request was answered: too busy"


async def test_a_server_that_fails_in_the_warm_up_is_stopped(monkeypatch):
    each, stopped = Contestant(Peer("a")), []
    each.stack.callback(stopped.append, True)
    await turned(monkeypatch, each, "C", {compare.WARM_UP: [shot(error="no")], 0: [shot()]})
    assert each.failure == "failed in case C, warm-up: 1 of 16 requests were not answered: no"
    assert stopped


def contestant(peer: Peer, **rounds: list[float | None]) -> Contestant:
    """One with the figures of its rounds, by case; None: it had none in that round."""
    found = Contestant(peer)
    found.rounds = {
        name: {
            number: {compare.CASES[name].figure: each, "wall_s": each, "elsewhere_cores": 0.0}
            for number, each in enumerate(row)
            if each is not None
        }
        for name, row in rounds.items()
    }
    return found


def test_ratios_are_above_one_where_the_first_is_ahead():
    everyone = [
        contestant(Peer("us"), C=[30, 20, 40], B=[1, 1, 2]),
        contestant(Peer("them"), C=[10, 20, 20], B=[2, 3, 2]),
    ]
    assert compare.ratios(everyone, "C") == {"them": {"to": "us", "ratio": 1.5, "q1": 1.5, "q3": 2.5, "rounds": 3}}
    assert compare.ratios(everyone, "B") == {"them": {"to": "us", "ratio": 2, "q1": 1.5, "q3": 2.5, "rounds": 3}}


def test_ratios_are_of_one_kind_of_weights_and_of_rounds_that_both_had():
    everyone = [
        contestant(Peer("us"), C=[30, 20, 90]),
        contestant(Peer("us int8", weights="int8"), C=[8, 8, 8]),
        contestant(Peer("them"), C=[10, 10]),
        contestant(Peer("them int8", weights="int8"), C=[4, 4, 4]),
        contestant(Peer("broken")),
    ]
    found = compare.ratios(everyone, "C")
    assert {name: (each["to"], each["ratio"], each["rounds"]) for name, each in found.items()} == {
        "them": ("us", 2.5, 2),
        "them int8": ("us int8", 2, 3),
    }


def test_ratios_pass_over_rounds_in_which_one_has_no_figure():
    everyone = [contestant(Peer("us"), C=[30, None, 90, 40]), contestant(Peer("them"), C=[10, 1, None, 20])]
    everyone[1].rounds["C"][4] = {"output_tok_s": None}
    assert compare.ratios(everyone, "C") == {
        "them": {"to": "us", "ratio": 35 / 15, "q1": 2.25, "q3": 2.75, "rounds": 2}
    }


def test_the_table_has_rounds_and_the_share_of_the_round_that_has_both(tmp_path):
    everyone = [
        contestant(Peer("us"), A=[30, 20, 90], C=[9, 5, 5], P=[7], S=[18]),
        contestant(Peer("them"), A=[10], C=[10]),
        contestant(Peer("others", shown="$X serve"), A=[10, 20, 30], C=[10, None, 10]),
        Contestant(Peer("absent"), failure="not started: $X not set"),
    ]
    everyone[2].lost = ["failed in case C, round 2: why"]
    arguments = SimpleNamespace(model="/models/m", cases="ACS", out=tmp_path)
    table = compare.markdown(compare.write(arguments, everyone, Limits(1e9)))
    assert (tmp_path / "compare.md").read_text() == table
    rows = {
        cells[1].strip(): [cell.strip() for cell in cells[2:-1]]
        for line in table.partition("| us to |")[0].splitlines()
        if (cells := line.split("|"))[2:]
    }
    assert [rows[name][1] for name in ("us", "others", "absent")] == ["3", "2 to 3", ""]
    assert rows["absent"][2] == "not started: $X not set"
    assert rows["us"][6] == "0.500"
    assert rows["us"][7] == "7.0"
    assert "| us to | rounds | A | C |" in table
    assert "| them | 1 | 3.00 (3.00 to 3.00) | 0.90" in table
    assert "- others: failed in case C, round 2: why" in table
    told = json.loads((tmp_path / "compare.json").read_text())
    assert told["servers"][2]["command"] == "$X serve"
    assert [row["round"] for row in told["servers"][2]["cases"]["C"]["rounds"]] == [1, 3]
    assert told["rounds"] == 3


@pytest.mark.parametrize("is_known", [True, False])
def test_a_run_that_is_stopped_keeps_its_cases_and_leaves_no_server(tmp_path, monkeypatch, capsys, is_known):
    """`is_known`: what a step of the model reads, which depends on its tokens if it has experts."""
    stopped, probed = [], []

    async def enter(stack, peer, words, seed):
        stack.callback(stopped.append, peer.name)
        return contestant(peer, A=[1, 2])

    async def measure(everyone, arguments, limits, keep):
        probed.append(limits.dtype)
        keep()
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.Event().wait()

    monkeypatch.setattr(compare, "SETTLE_S", 0)
    monkeypatch.setattr(compare, "enter", enter)
    monkeypatch.setattr(compare, "measure", measure)
    found = Limits(1e9) if is_known else None
    monkeypatch.setattr(compare, "probe_where_known", lambda _: contextlib.nullcontext(found))
    monkeypatch.setattr(compare, "probe", lambda _: contextlib.nullcontext(Limits(1e9)))
    (tmp_path / "peers.toml").write_text('[[server]]\nname = "a"\nurl = "x"\n')
    out = tmp_path / "new" / "out"
    argv = [str(tmp_path / "peers.toml"), "--model", "builtin", "--cases", "A", "--out", str(out)]
    assert compare.main(argv) == compare.STOPPED
    assert stopped == ["a"] and probed == ["bfloat16" if is_known else ""]
    assert json.loads((out / "compare.json").read_text())["rounds"] == 2
    assert "stopped; cases that were measured are in" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["none.toml", "--model", "builtin"], "none.toml cannot be read"),
        ([str(ROOT / "pyproject.toml"), "--model", "builtin"], "must hold"),
        (["none.toml", "--model", "builtin", "--cases", "AX"], "--cases AX"),
    ],
)
def test_bad_arguments(capsys, argv, said):
    assert compare.main(argv) == 2
    assert said in capsys.readouterr().err


@pytest.mark.slow
def test_servers_are_compared_and_one_that_fails_is_a_row(tmp_path, capsys, monkeypatch):
    cases = {
        "C": compare.Case(2, 2, 8, 8, 4, "output_tok_s", True),
        "B": compare.Case(1, 1, 0, 16, 1, "wall_s", False),
        "S": compare.Case(2, 1, 8, 8, 4, "wall_s", False, once=True),
    }
    monkeypatch.setattr(compare, "CASES", cases)
    monkeypatch.setattr(compare, "SETTLE_S", 0)
    with Server() as ours, Other(takes_ids=False).listening() as theirs:
        peers = tmp_path / "peers.toml"
        peers.write_text(
            f'[[server]]\nname = "ours"\nurl = "{ours.url}"\n'
            f'[[server]]\nname = "theirs"\nurl = "{theirs}"\nversion = "echo 1.2"\ncases = "CB"\nrounds = 1\n'
            '[[server]]\nname = "gone"\ncommand = "/no/such/program {port}"\n'
        )
        argv = [str(peers), "--model", "builtin", "--rounds", "2", "--cases", "CBS", "--out", str(tmp_path / "out")]
        assert compare.main(argv) == 0
    result = json.loads((tmp_path / "out/compare.json").read_text())
    assert result["servers"][1]["version"] == "1.2"
    assert result["ratios"]["C"]["theirs"]["ratio"] > 0
    assert result["ratios"]["C"]["theirs"]["rounds"] == 1
    # The probe's first, one before all turns, one after each: warm-up and two rounds of ours, warm-up and one of
    # theirs, and S.
    assert len(result["bytes_per_s"]) == 2 + 2 * (3 + 2) + 1
    requests = result["servers"][0]["requests"]
    assert [len(each) for each in requests["C"]] == [2, 2]
    assert {each["prompt_tokens"] for round_ in requests["C"] for each in round_} == {16}
    assert [len(each) for each in requests["S"]] == [2]
    table = (tmp_path / "out/compare.md").read_text()
    assert table == capsys.readouterr().out
    assert "| ours to | rounds | C | B |" in table
    assert "| **the best of them** | | " in table
    assert "| gone | bf16 |  | did not start: /no/such/program cannot be started" in table


def test_without_any_server_there_is_no_comparison(tmp_path, capsys):
    peers = tmp_path / "peers.toml"
    peers.write_text('[[server]]\nname = "a"\ncommand = "/no/such/program {port}"\n')
    assert compare.main([str(peers), "--model", "builtin", "--out", str(tmp_path)]) == 1
    assert "/no/such/program cannot be started" in capsys.readouterr().err
    assert not (tmp_path / "compare.md").exists()
