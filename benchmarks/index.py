"""The index of the records: benchmarks/results/README.md, made of index.toml and the records.

    python -m benchmarks.index           # writes it

index.toml says which records are current, what each shows, what it replaces, and what is known of
it that it does not say itself.
"""

from __future__ import annotations

import json
import re
import subprocess
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks import figures
from benchmarks.record import RESULTS

INDEX = RESULTS / "index.toml"
PAGE = RESULTS / "README.md"
ARCHIVE = RESULTS / "archive"
REQUIRED = ("command", "versions", "commit", "hardware", "date")
"""What every record should say, or the index in its place."""

COPIED = "copied from a printed table"
CAVEATS = {
    "plain with processor": "Plain vLLM ran with a logits processor of this package (the windowed "
    "penalty), which the penalised texts need and which vLLM's users do not have. It may have "
    "slowed plain vLLM down; by how much is not recorded.",
}

# Where a record has no field of that name.
_OTHER_NAMES = {"versions": "software"}
_NOT_SAID = ("", None, "not in a repository", "no commit")
_PLACEHOLDER = re.compile(r"\{(\d):([^}]+)\}")


def read() -> dict[str, Any]:
    """index.toml: ``record``, a list of tables, and ``archive``, file to what it was."""
    return tomllib.loads(INDEX.read_text())


def kept_files(folder: Path) -> set[str]:
    """Names of the files in a folder that belong to the project.

    What git does not know is a run of somebody's own (``make bench``) and needs no entry.
    """
    listed = subprocess.run(
        ["git", "-C", str(folder), "ls-files", "--", "."], capture_output=True, text=True
    )
    if listed.returncode:
        return {path.name for path in folder.iterdir() if path.is_file()}
    return {name for name in listed.stdout.splitlines() if "/" not in name}


def load(file: str) -> Any:
    return json.loads((RESULTS / file).read_text())


def said(record: Any) -> dict[str, Any]:
    """Those of :data:`REQUIRED` that a record says itself, at its top or in its parts."""
    found: dict[str, Any] = {}
    for source in _sources(record):
        for name in REQUIRED:
            value = source.get(name) or source.get(_OTHER_NAMES.get(name, name))
            if value not in _NOT_SAID:
                found.setdefault(name, value)
    return found


def shows(entry: Mapping[str, Any]) -> str:
    """What a record shows, with its figures put in."""
    record = load(entry["file"])

    def figure(found: re.Match[str]) -> str:
        return figures.rounded(figures.look_up(record, found[2]), int(found[1]))

    return _PLACEHOLDER.sub(figure, entry["shows"])


def without_figures(text: str) -> str:
    """``shows`` with nothing in the places of its figures."""
    return _PLACEHOLDER.sub(" ", text)


def render(index: Mapping[str, Any]) -> str:
    """The page: a table of the themes, then every current record, then the replaced ones."""
    entries = index["record"]
    lines = [
        "# Records",
        "",
        "Made by `python -m benchmarks.index` from [index.toml](index.toml) and the records: edit "
        "that, not this page.",
        "",
        f'A record marked "{COPIED}" did not come back from its machine as a file. What a record '
        "does not say itself stands in italics.",
        "",
        "A new record gets an entry in index.toml; what it replaces moves to archive/ and gets a "
        "line there. A test finds what is missing.",
        "",
        "| theme | record | hardware | date | commit |",
        "| --- | --- | --- | --- | --- |",
    ]
    for entry in entries:
        known = _known(entry)
        mark = f" ({COPIED})" if entry.get("copied") else ""
        row = [entry["theme"], f"[{_title(entry)}](#{_title(entry)}){mark}"]
        row += [_machine(entry), known["date"].strip("*")[:10], _hashes(known["commit"])]
        lines.append(f"| {' | '.join(row)} |")
    for entry in entries:
        lines += ["", f"## {_title(entry)}", "", *_block(entry, index["archive"])]
    return "\n".join(lines) + "\n"


def _block(entry: Mapping[str, Any], archived: Mapping[str, str]) -> list[str]:
    known = _known(entry)
    files = [f"[{file}]({file})" for file in _files_of(entry["file"], RESULTS)]
    lines = [shows(entry), "", f"- files: {', '.join(files)}"]
    if entry.get("copied"):
        lines.append(f"- **{COPIED}**")
    if "caveat" in entry:
        lines.append(f"- {CAVEATS[entry['caveat']]}")
    lines += [f"- {name}: {known[name]}" for name in REQUIRED]
    if entry.get("replaces"):
        lines.append("- replaces:")
        lines += [f"  - [{old}](archive/{old}): {archived[old]}" for old in entry["replaces"]]
    return lines


def _known(entry: Mapping[str, Any]) -> dict[str, str]:
    own = said(load(entry["file"]))
    known = {name: _in_words(name, value) for name, value in own.items()}
    return known | {name: f"*{text}*" for name, text in entry.get("established", {}).items()}


def _in_words(name: str, value: Any) -> str:
    if name == "hardware" and isinstance(value, dict):
        return value.get("gpu") or f"{value['cores']} cores, {value['cpu']}"
    if isinstance(value, dict):
        return ", ".join(f"{key} {text}" for key, text in value.items())
    return f"`{value}`" if name == "command" and "`" not in value else str(value)


def _machine(entry: Mapping[str, Any]) -> str:
    """The hardware without what was said about it."""
    hardware = said(load(entry["file"])).get("hardware") or entry["established"]["hardware"]
    if isinstance(hardware, dict):
        return _in_words("hardware", hardware)
    return re.split(r"[,;:(]| of one", hardware)[0].removeprefix("one ").strip()


def _hashes(commit: str) -> str:
    if "not recorded" in commit:
        return "*not recorded*"
    hashes = " and ".join(re.findall(r"\b[0-9a-f]{7}\b", commit))
    # Code that was not committed: "... with changes", or with what in words.
    return f"{hashes} with changes" if " with " in commit else hashes


def _title(entry: Mapping[str, Any]) -> str:
    return str(entry["file"]).removesuffix(".json")


def _files_of(file: str, folder: Path) -> list[str]:
    """A record and what was drawn or written of it: the files of its name."""
    stem = file.removesuffix(".json")
    return sorted(path.name for path in folder.glob(f"{stem}.*"))


def _sources(record: Any) -> list[Mapping[str, Any]]:
    if not isinstance(record, dict):
        return []
    parts = [*record.get("parts", []), *record.get("runs", [])]
    return [record, *(part.get("description", part) for part in parts)]


if __name__ == "__main__":
    PAGE.write_text(render(read()))
    print(f"written to {PAGE.name}")
