"""What records say of where they come from."""

import json
import sys

import pytest

from benchmarks import record


def test_a_record_does_not_say_in_which_folder_the_heads_lay() -> None:
    options = {"heads": "/somewhere/else/heads", "ngram_k": 3}
    assert record.without_folder(options) == {"heads": "heads", "ngram_k": 3}
    assert json.loads(record.without_folder(json.dumps(options)))["heads"] == "heads"


def test_a_command_holds_names_and_no_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["--model", "/somewhere/small", "--engine", '{"heads": "/somewhere/heads"}', "--n", "3"]
    monkeypatch.setattr(sys, "argv", ["/somewhere/bin/program", *words])
    command = record.surroundings()["command"]
    assert "somewhere" not in command
    assert command.endswith("""--model small --engine '{"heads": "heads"}' --n 3""")
