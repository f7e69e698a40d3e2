"""The tutorials: every source runs, every notebook was made from its source, every number in the prose is computed."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

TUTORIALS = Path(__file__).resolve().parents[1] / "tutorials"
sys.path.insert(0, str(TUTORIALS))

import build  # noqa: E402  (lives in tutorials/)

SOURCES = build.sources()
NAMES = [source.stem for source in SOURCES]
DECIMAL = re.compile(r"(?<![\w.])\d+\.\d+(?![\w.]*/)")


def cells(source: Path) -> list:
    import jupytext

    return jupytext.read(source, fmt="py:percent").cells


@pytest.mark.slow
@pytest.mark.parametrize("source", SOURCES, ids=NAMES)
def test_every_source_runs_and_its_assertions_hold(source):
    if '"g++"' in source.read_text() and shutil.which("g++") is None:
        pytest.skip("this tutorial compiles C++, and there is no g++ on this machine")
    done = subprocess.run(
        [sys.executable, source.name],
        cwd=TUTORIALS,
        env={**os.environ, "MINILLAVA_REFERENCE": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    pictures = re.findall(r"^(.+\.svg): .", done.stdout, re.MULTILINE)
    assert len(pictures) == source.read_text().count("Picture(") and all(Path(file).is_file() for file in pictures)


@pytest.mark.parametrize("source", SOURCES, ids=NAMES)
def test_the_notebook_was_made_from_its_source(source):
    notebook = nbformat.read(source.with_suffix(".ipynb"), as_version=4)
    assert notebook.metadata.minillava.sha256 == build.source_hash(source), "run `make tutorials`"
    nbformat.validate(notebook)
    for made, written in zip(notebook.cells, cells(source), strict=True):
        assert (made.cell_type, made.source) == (written.cell_type, written.source)


@pytest.mark.parametrize("source", SOURCES, ids=NAMES)
def test_the_notebook_has_outputs_and_no_error(source):
    notebook = nbformat.read(source.with_suffix(".ipynb"), as_version=4)
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error" or output.get("name") == "stderr"]
    drawn = sum("image/svg+xml" in output.get("data", {}) for output in outputs)
    assert drawn == sum(cell.source.count("\nPicture(") for cell in notebook.cells) > 0


def test_every_notebook_has_a_source():
    assert {path.stem for path in TUTORIALS.glob("*.ipynb")} == set(NAMES)


@pytest.mark.parametrize("source", SOURCES, ids=NAMES)
def test_each_picture_comes_with_a_prediction_before_and_a_sentence_after(source):
    asked = False
    listing = cells(source)
    for number, cell in enumerate(listing):
        asked = asked or (cell.cell_type == "markdown" and "**Predict.**" in cell.source)
        if cell.cell_type == "code" and "\nPicture(" in cell.source:
            assert asked, f"cell {number} draws what nobody was asked to predict"
            assert listing[number + 1].source.startswith("**What to see.**"), f"cell {number}"
            asked = False


@pytest.mark.parametrize("source", SOURCES, ids=NAMES)
def test_every_decimal_number_of_the_prose_is_in_the_code(source):
    """A number that the prose quotes passes through `quote`, or it is an input that the code uses."""
    listing = cells(source)
    code = "\n".join(cell.source for cell in listing if cell.cell_type == "code")
    prose = "\n".join(cell.source for cell in listing if cell.cell_type == "markdown")
    prose = re.sub(
        r"arXiv \d+\.\d+|\*\*\d+\.\d+\*\*|LLaVA-1\.5|Qwen2\.5|[Cc]laim [A-Z]\d+|exercise \d\.\d|`solution.*?`",
        "",
        prose,
    )
    code = re.sub(r"check\(.*?\)", "", code)
    missing = {number for number in DECIMAL.findall(prose) if number not in code}
    assert not missing


@pytest.mark.parametrize("source", SOURCES, ids=NAMES)
def test_exercises_are_asked_in_order_and_exist(source):
    from exercises import EXERCISES

    asked = re.findall(r'^check\("(\d+\.\d+)"', source.read_text(), flags=re.MULTILINE)
    number = str(int(source.stem[:2]))
    assert asked == [name for name in EXERCISES if name.split(".")[0] == number] != []


def test_a_quoted_number_must_be_right():
    from reader import quote

    quote("42.8", 42.7974)
    with pytest.raises(AssertionError, match=r"the prose says 42\.8, the code gives 42\.9"):
        quote("42.8", 42.86)


def test_a_failing_cell_fails_the_build(tmp_path):
    from nbclient.exceptions import CellExecutionError

    broken = tmp_path / "99_broken.py"
    broken.write_text("# %%\nassert 1 == 2, 'no'\n")
    with pytest.raises(CellExecutionError, match="no"):
        build.build(broken)
    assert not broken.with_suffix(".ipynb").exists()


def test_a_notebook_that_names_the_machine_is_refused(tmp_path):
    leaky = tmp_path / "98_leaky.py"
    leaky.write_text("# %%\nimport sys\nprint(sys.prefix)\n")
    with pytest.raises(ValueError, match="names this machine"):
        build.execute(leaky)


def test_the_same_source_gives_the_same_notebook(tmp_path):
    source = tmp_path / "97_same.py"
    source.write_text(
        "# %%\nfrom reader import Picture\nfrom minillava.style import canvas\n"
        "for i in range(3):\n    print(i, flush=True)\n"
        "figure, (panel,) = canvas(1, 1, 2, 2)\npanel.plot([1, 3, 2])\nPicture(figure, 'a line')\n"
    )
    first, second = (nbformat.writes(build.execute(source)) for _ in range(2))
    assert first == second
    assert "image/svg+xml" in first
    assert [o.text for o in nbformat.reads(first, 4).cells[0].outputs if "text" in o] == ["0\n1\n2\n"]
