"""What each training reads from the built-in world, and what each test asks. One number seeds every split."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from minillava import scenes
from minillava.data import Sample

SPLITS = ("train", "selection", "test", "novel")
IMAGE = "<image>"


@dataclass
class WorldConfig:
    """Size of the world. `kinds` are the questions asked, one named twice twice as often."""

    grid: int = 2
    image_size: int = 32
    kinds: tuple[str, ...] = ("colour_at", "shape_at", "count")
    train_scenes: int = 12_000
    eval_scenes: int = 600
    questions: int = 3


@dataclass
class Split:
    """Scenes (n, grid²) and their pictures (n, 3, S, S) uint8."""

    name: str
    cells: np.ndarray
    pixels: np.ndarray


def build_split(config: WorldConfig, name: str, seed: int) -> Split:
    """Draw a split: `train`, `selection` (to choose learning rates on), `test`, or `novel` (pairs never trained on)."""
    if name not in SPLITS:
        raise ValueError(f"unknown split '{name}': choose from {', '.join(SPLITS)}")
    rng = np.random.default_rng([seed, SPLITS.index(name)])
    n = config.train_scenes if name == "train" else config.eval_scenes
    cells = scenes.sample_scenes(n, config.grid, rng, novel=name == "novel")
    return Split(name, cells, scenes.draw(cells, config.image_size, rng))


def visual_questions(split: Split, kinds: Sequence[str], questions: int, rng: np.random.Generator) -> list[Sample]:
    """One conversation about each picture: `questions` turns, the kinds drawn evenly."""
    samples = []
    for i, scene in enumerate(split.cells):
        asked = [str(kind) for kind in rng.choice(kinds, size=questions)]
        turns: list[tuple[str, str | None]] = [scenes.ask(scene, kind, rng) for kind in asked]
        turns[0] = (f"{IMAGE} {turns[0][0]}", turns[0][1])
        samples.append(Sample(f"{split.name}-{i}", turns, [i], asked))
    return samples


def captions(split: Split) -> list[Sample]:
    """'describe' each picture: what stage 1 trains on."""
    return [
        Sample(f"{split.name}-{i}-caption", [(f"{IMAGE} {scenes.DESCRIBE}", scenes.describe(scene))], [i], ["caption"])
        for i, scene in enumerate(split.cells)
    ]


def word_questions(
    cells: np.ndarray, kinds: Sequence[str], questions: int, rng: np.random.Generator, name: str = "words"
) -> list[Sample]:
    """The same questions, but the scene is told in words, in random order, instead of shown."""
    samples = []
    for i, scene in enumerate(cells):
        asked = [str(kind) for kind in rng.choice(kinds, size=questions)]
        turns: list[tuple[str, str | None]] = [scenes.ask(scene, kind, rng) for kind in asked]
        turns[0] = (f"{scenes.describe(scene, rng.permutation(len(scene)))} {turns[0][0]}", turns[0][1])
        samples.append(Sample(f"{name}-{i}", turns, [], [f"words/{kind}" for kind in asked]))
    return samples


def retellings(cells: np.ndarray, rng: np.random.Generator) -> list[Sample]:
    """A scene told in random order, retold in order: looking things up, densely supervised."""
    samples = []
    for i, scene in enumerate(cells):
        told = scenes.describe(scene, rng.permutation(len(scene)))
        turns: list[tuple[str, str | None]] = [(f"{told} {scenes.DESCRIBE}", scenes.describe(scene))]
        samples.append(Sample(f"retell-{i}", turns, [], ["retell"]))
    return samples


def text_only(pairs: Sequence[tuple[str, str, str]], n: int, questions: int, rng: np.random.Generator) -> list[Sample]:
    """`n` conversations of `questions` turns drawn from (kind, question, answer) triples."""
    drawn = rng.integers(len(pairs), size=(n, questions))
    return [
        Sample(f"text-{i}", [pairs[j][1:] for j in row], [], [f"text/{pairs[j][0]}" for j in row])
        for i, row in enumerate(drawn)
    ]


def language_samples(config: WorldConfig, n: int, seed: int) -> list[Sample]:
    """What the language model is pretrained on: half questions about scenes in words, a quarter retellings, a quarter
    text-only questions (all of them: the tested ones are learnt here, and only here)."""
    rng = np.random.default_rng([seed, 10])
    cells = scenes.sample_scenes(n, config.grid, rng)
    replayed, tested = scenes.split_text_questions()
    return (
        word_questions(cells[: n // 2], config.kinds, config.questions, rng)
        + retellings(cells[n // 2 : 3 * n // 4], rng)
        + text_only(replayed + tested, n - 3 * n // 4, config.questions + 2, rng)
    )


def instruction_samples(config: WorldConfig, train: Split, seed: int) -> list[Sample]:
    """Stage 2: questions about pictures, with captions, and text of both sorts mixed in (six to one to one to one).

    The text-only questions that are tested are not among them.
    """
    rng = np.random.default_rng([seed, 11])
    n = len(train.cells) // 6
    replayed, _ = scenes.split_text_questions()
    cells = scenes.sample_scenes(n, config.grid, rng)
    told = captions(train)
    return (
        visual_questions(train, config.kinds, config.questions, rng)
        + [told[i] for i in rng.permutation(len(told))[:n]]
        + word_questions(cells, config.kinds, config.questions, rng)
        + text_only(replayed, n, config.questions, rng)
    )


def tested_text() -> list[Sample]:
    """Every tested text-only question, alone in its conversation."""
    _, tested = scenes.split_text_questions()
    return [Sample(f"tested-{i}", [(q, a)], [], [f"text/{kind}"]) for i, (kind, q, a) in enumerate(tested)]
