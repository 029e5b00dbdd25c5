"""benchmarks/compare.py: what it reads, what it writes, and one whole run between two servers that are there."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import compare
from server.commands import UsageError
from tests.live import Server
from tests.server.test_bench_client import Other

ROOT = Path(__file__).parent.parent


def read(tmp_path: Path, text: str) -> list[compare.Peer]:
    path = tmp_path / "peers.toml"
    path.write_text(text)
    return compare.read_peers(path, {"model": "/models/a b"})


def test_a_peer_is_read_and_its_places_are_filled(tmp_path, monkeypatch):
    monkeypatch.setenv("GGUF", "/x.gguf")
    (peer,) = read(
        tmp_path,
        '[[server]]\nname = "a"\ncommand = "run {model} -m $GGUF --port {port}"\nenv = { N = "{model}" }\n',
    )
    assert peer.command == ("run", "/models/a b", "-m", "/x.gguf", "--port", "{port}")
    assert peer.env == {"N": "/models/a b"}
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
        ("[[server]]\nname = 'a'\nurl = 3", "every value must be text"),
        ("[[server]]\nname = 'a'\ncommand = 'x $NOT_SET_ANYWHERE'", "wants $NOT_SET_ANYWHERE"),
        ("[[server]]\nname = 'a'\nurl = 'y'\n[[server]]\nname = 'a'\nurl = 'z'", "two servers have one name"),
    ],
)
def test_a_broken_file_of_peers_says_where(tmp_path, text, said):
    with pytest.raises(UsageError) as error:
        read(tmp_path, text)
    assert said in str(error.value)


def test_the_committed_peers_are_read(monkeypatch):
    monkeypatch.setenv("GGUF", "/x.gguf")
    peers = compare.read_peers(ROOT / "benchmarks/peers.toml", {"model": "m"})
    assert peers[0].name == "Pequod"
    assert all("{port}" in " ".join(peer.command) for peer in peers)


def test_ratios_are_above_one_where_the_first_is_ahead():
    def contestant(name: str, rates: list[float], walls: list[float]):
        rounds = {
            "C": [{"output_tok_s": rate} for rate in rates],
            "B": [{"wall_s": wall} for wall in walls],
        }
        return SimpleNamespace(peer=compare.Peer(name), rounds=rounds)

    everyone = [contestant("us", [30, 20, 40], [1, 1, 2]), contestant("them", [10, 20, 20], [2, 3, 2])]
    assert compare.ratios(everyone, "C") == {"them": {"ratio": 1.5, "q1": 1.5, "q3": 2.5}}
    assert compare.ratios(everyone, "B") == {"them": {"ratio": 2, "q1": 1.5, "q3": 2.5}}


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
def test_two_servers_are_compared(tmp_path, capsys, monkeypatch):
    small = compare.Case(2, 2, 8, 8, 4, "output_tok_s", True)
    monkeypatch.setattr(compare, "CASES", {"C": small, "B": compare.Case(1, 1, 0, 16, 1, "wall_s", False)})
    with Server() as ours, Other(takes_ids=False).listening() as theirs:
        peers = tmp_path / "peers.toml"
        peers.write_text(
            f'[[server]]\nname = "ours"\nurl = "{ours.url}"\n'
            f'[[server]]\nname = "theirs"\nurl = "{theirs}"\nversion = "echo 1.2"\n'
        )
        argv = [str(peers), "--model", "builtin", "--rounds", "2", "--cases", "CB", "--out", str(tmp_path / "out")]
        assert compare.main(argv) == 0
    result = json.loads((tmp_path / "out/compare.json").read_text())
    assert result["servers"][1]["version"] == "1.2"
    assert result["ratios"]["C"]["theirs"]["ratio"] > 0
    assert len(result["bytes_per_s"]) == 1 + 2 * 2 * 3  # the probe's first, then one before each turn
    requests = result["servers"][0]["requests"]["C"]
    assert [len(each) for each in requests] == [2, 2]
    assert {each["prompt_tokens"] for round_ in requests for each in round_} == {16}
    table = (tmp_path / "out/compare.md").read_text()
    assert table == capsys.readouterr().out
    assert "| ours to | C | B |" in table


def test_a_server_that_cannot_be_started_ends_the_comparison(tmp_path, capsys):
    peers = tmp_path / "peers.toml"
    peers.write_text('[[server]]\nname = "a"\ncommand = "/no/such/program {port}"\n')
    assert compare.main([str(peers), "--model", "builtin", "--out", str(tmp_path)]) == 1
    assert "/no/such/program cannot be started" in capsys.readouterr().err
