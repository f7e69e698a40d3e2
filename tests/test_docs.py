"""What the documents promise exists: paths, names, commands; the README's figures are those of the committed run."""

import importlib
import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("examples/*/README.md")])
PATH = re.compile(r"`((?:minillava|theory|tests|docs|benchmarks|tutorials|examples|results|\.ci)/[\w./-]*)`")
NAME = re.compile(r"`((?:minillava|theory)(?:\.\w+)+)`")
LINK = re.compile(r"\]\((?!https?:|#|mailto:)([^)#\s]+)")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_paths_and_links_exist(document):
    text = document.read_text()
    missing = [path for path in PATH.findall(text) if not (ROOT / path).exists()]
    missing += [link for link in LINK.findall(text) if not (document.parent / link).exists()]
    assert not missing


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_names_exist(document):
    for name in NAME.findall(document.read_text()):
        module, _, attribute = name.rpartition(".")
        try:
            importlib.import_module(name)
        except ModuleNotFoundError:
            assert hasattr(importlib.import_module(module), attribute), f"{name} in {document.name}"


REPORTS = sorted(ROOT.glob("results/*/report.md"))


@pytest.mark.parametrize("document", [*DOCUMENTS, *REPORTS], ids=lambda p: str(p.relative_to(ROOT)))
def test_rows_of_a_table_have_as_many_cells_as_its_header(document):
    """Otherwise it is shown as text, bars and all. A bar inside a cell is written with a backslash."""
    for table in re.findall(r"(?:^\|.*\n?)+", document.read_text(), flags=re.MULTILINE):
        cells = [len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()]
        assert len(set(cells)) == 1, table.splitlines()[0]


def commands() -> list[str]:
    """Every `minillava ...` and `python -m theory ...` line in the README's code blocks."""
    blocks = re.findall(r"```\w*\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    lines = [line.split("#")[0].strip() for block in blocks for line in block.splitlines()]
    return [line for line in lines if re.match(r"(minillava|python -m theory) ", line)]


def test_the_readme_shows_commands():
    assert len(commands()) >= 5


@pytest.mark.parametrize("command", commands())
def test_options_in_the_readme_exist(command):
    """Options are those of the verb. What the commands *do* is tested elsewhere."""
    import subprocess
    import sys

    words = command.replace("python -m theory", "theory").split()
    help_text = subprocess.run(
        [sys.executable, "-m", words[0], words[1], "--help"], capture_output=True, text=True, check=True
    ).stdout
    for option in (word for word in words if word.startswith("--")):
        assert option in help_text, f"{option} of: {command}"


def test_results_in_the_readme_are_those_of_the_committed_run():
    from minillava.report import readme_table

    results = json.loads((ROOT / "results" / "three-seeds" / "results.json").read_text())
    assert readme_table(results) in (ROOT / "README.md").read_text()


def test_no_page_names_this_machine():
    """No tracked text holds an absolute path of somebody's machine."""
    import subprocess

    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    found = []
    for name in tracked:
        path = ROOT / name
        if path.suffix in {".py", ".md", ".toml", ".cu", ".cuh", ".cpp", ".h", ".sh", ".json"} and path.is_file():
            if re.search(r"(?<![\w.])/(work|root|home)/\w", path.read_text(errors="replace")):
                found.append(name)
    assert not found
