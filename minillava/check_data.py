"""Read a data folder once, before training, and name everything in it that training would stumble over."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from minillava.data import Sample
from minillava.llava_json import NO_JSON, Problem, json_files, open_picture, read_picture, samples, shown
from minillava.tokenizer import IGNORE, UNKNOWN, Tokenizer, render


@dataclass
class Report:
    """What was read and what is wrong with it: for each bad sample one problem, the first found.

    `images` counts distinct pictures; `longest` is the number of tokens of the longest sample (0 if none was counted).
    """

    problems: list[Problem] = field(default_factory=list)
    samples: int = 0
    images: int = 0
    longest: int = 0

    def lines(self) -> Iterator[str]:
        yield from map(str, self.problems)
        longest = f", at most {self.longest:,} tokens in a sample" if self.longest else ""
        yield f"{self.samples:,} sample(s), {self.images:,} picture(s){longest}: {len(self.problems):,} problem(s)"

    def __str__(self) -> str:
        return "\n".join(self.lines())


def check_data(path: Path | str, image_tokens: int, tokenizer: Tokenizer, full: bool = True) -> Report:
    """Read every sample of a folder in LLaVA's format (or of one JSON file in it), and each of its pictures once.

    With `full`, pictures are decoded and texts are tokenized; otherwise only the headers of pictures are read, which
    is several times faster, and damage behind them stays unseen. Nothing raises for bad data: to be told about it is
    what the report is for.
    """
    report = Report()
    checked: dict[str, str | None] = {}  # pictures (a Path would take thrice the memory), and what is wrong with them
    files = json_files(path)
    if not files:
        report.problems.append(Problem("", shown(str(path)), NO_JSON))
    for file in files:
        root, before = file.parent.resolve(), report.samples
        try:
            for item in samples(file):
                report.samples += 1
                if isinstance(item, Problem):
                    report.problems.append(item)
                    continue
                sample, pictures = item
                problem = picture_problem(sample, pictures, root, checked, full)
                if full and not problem:
                    problem = token_problem(sample, file, image_tokens, tokenizer, report)
                if problem:
                    report.problems.append(problem)
        except OSError as error:
            report.problems.append(Problem("", file.name, f"can't be read: {error.strerror}"))
        else:
            if report.samples == before:
                report.problems.append(Problem("", file.name, "holds no conversation"))
    report.images = len(checked)
    return report


def picture_problem(
    sample: Sample, pictures: list[Path], root: Path, checked: dict[str, str | None], full: bool
) -> Problem | None:
    """The first picture of a sample that can't be used. `checked` remembers, since samples share pictures."""
    for picture in pictures:
        name = str(picture.relative_to(root))
        if name not in checked:
            checked[name] = None
            try:
                if full:
                    read_picture(picture, image_size=32)
                else:
                    open_picture(picture).close()
            except ValueError as error:
                checked[name] = str(error)
        if message := checked[name]:
            return Problem(shown(sample.id), shown(name), message)
    return None


def token_problem(
    sample: Sample, file: Path, image_tokens: int, tokenizer: Tokenizer, report: Report
) -> Problem | None:
    """Whether the sample teaches anything in this tokenizer's pieces; notes its length in the report."""
    ids, labels = render(tokenizer, sample.turns, image_tokens)
    report.longest = max(report.longest, len(ids))
    if not tokenizer.decode([label for label in labels if label not in (IGNORE, UNKNOWN)]).strip():
        return Problem(shown(sample.id), file.name, "no supervised token: the tokenizer knows no piece of its answers")
    return None
