"""The built-in world: coloured shapes on a grid, the words for them, and questions whose answers are exact.

Everything is a pure function of its seed. A scene is a row of `cells` (one integer per cell: 0 is empty, otherwise
1 + colour·4 + shape); the picture, the description and every question are derived from it, so they cannot disagree.
The same question can be asked of the picture or of the description in words: a language model learns to answer from
words long before it sees.
"""

from __future__ import annotations

import numpy as np

COLOURS = {
    "red": (210, 40, 40),
    "green": (40, 170, 60),
    "blue": (50, 80, 220),
    "yellow": (225, 205, 50),
    "purple": (165, 60, 190),
    "cyan": (60, 200, 210),
}
SHAPES = ("circle", "square", "triangle", "cross")
PLACES = {
    2: ("northwest", "northeast", "southwest", "southeast"),
    3: ("northwest", "north", "northeast", "west", "centre", "east", "southwest", "south", "southeast"),
}
NUMBERS = (
    "zero one two three four five six seven eight nine ten "
    "eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen"
).split()

COLOUR_NAMES = tuple(COLOURS)
PAIRS = np.arange(1, 1 + len(COLOURS) * len(SHAPES))  # every (colour, shape), as a cell value
NOVEL_PAIRS = np.array([1 + c * len(SHAPES) + s for c, s in ((0, 3), (1, 2), (2, 0), (3, 1))])  # never in training
TRAINING_PAIRS = np.setdiff1d(PAIRS, NOVEL_PAIRS)

DESCRIBE = "describe ."  # the request for a caption
QUESTION_KINDS = ("colour_at", "shape_at", "count", "count_colour", "exists", "verify", "relation")


def colour_of(cell: int) -> str:
    return COLOUR_NAMES[(cell - 1) // len(SHAPES)]


def shape_of(cell: int) -> str:
    return SHAPES[(cell - 1) % len(SHAPES)]


def sample_scenes(n: int, grid: int, rng: np.random.Generator, novel: bool = False) -> np.ndarray:
    """Draw `n` scenes (n, grid²) of 1 to grid² objects; with `novel`, each holds a pair never seen in training."""
    cells = rng.choice(TRAINING_PAIRS, size=(n, grid * grid))
    rank = rng.permuted(np.tile(np.arange(grid * grid), (n, 1)), axis=1)  # a random order of the cells of each scene
    cells[rank >= rng.integers(1, grid * grid + 1, size=(n, 1))] = 0
    if novel:
        cells[rank == 0] = rng.choice(NOVEL_PAIRS, size=n)  # the cell of rank 0 is never empty
    return cells


def draw(cells: np.ndarray, image_size: int, rng: np.random.Generator) -> np.ndarray:
    """Draw scenes (n, grid²) as uint8 pictures (n, 3, S, S): jittered, of varying size, on noisy grey."""
    n, grid = len(cells), int(cells.shape[1] ** 0.5)
    side = image_size // grid  # pixels of a cell's edge
    pictures = np.empty((n, 3, image_size, image_size), dtype=np.float32)
    pictures[:] = rng.uniform(95, 140, size=(n, 1, 1, 1))
    pictures += rng.normal(0, 9, size=pictures.shape).astype(np.float32)
    palette = np.array(list(COLOURS.values()), dtype=np.float32)
    offsets = np.arange(side, dtype=np.float32) - (side - 1) / 2
    for place in range(grid * grid):
        value = cells[:, place] - 1
        centre = rng.uniform(-0.09, 0.09, size=(2, n, 1, 1)).astype(np.float32) * side
        radius = rng.uniform(0.32, 0.42, size=(n, 1, 1)).astype(np.float32) * side
        x, y = offsets[None, None, :] - centre[0], offsets[None, :, None] - centre[1]  # (n, 1, side), (n, side, 1)
        inside = shape_mask(x, y, radius, value % len(SHAPES)) & (value >= 0)[:, None, None]  # (n, side, side)
        colour = palette[value // len(SHAPES)] + rng.normal(0, 12, size=(n, 3)).astype(np.float32)
        row, column = divmod(place, grid)
        window = pictures[:, :, row * side : (row + 1) * side, column * side : (column + 1) * side]
        noise = rng.normal(0, 6, size=window.shape).astype(np.float32)
        np.copyto(window, colour[:, :, None, None] + noise, where=inside[:, None])
    return pictures.clip(0, 255).astype(np.uint8)


def shape_mask(x: np.ndarray, y: np.ndarray, radius: np.ndarray, shape: np.ndarray) -> np.ndarray:
    """Which points (x, y) relative to the centre lie inside: one formula per shape, chosen by index (n,)."""
    arm = np.maximum(np.abs(x), np.abs(y))
    circle = x * x + y * y <= radius**2
    square = arm <= 0.85 * radius
    triangle = (y <= 0.8 * radius) & (np.abs(x) <= (y + radius) * 0.58)
    cross = (arm <= radius) & ((np.abs(x) <= 0.33 * radius) | (np.abs(y) <= 0.33 * radius))
    return np.choose(shape[:, None, None], (circle, square, triangle, cross))


def describe(scene: np.ndarray, order: np.ndarray | None = None) -> str:
    """The scene (grid²,) in words, place first: 'northwest red circle , southeast blue square .'"""
    places = PLACES[int(len(scene) ** 0.5)]
    order = np.arange(len(scene)) if order is None else order
    things = [f"{places[i]} {colour_of(scene[i])} {shape_of(scene[i])}" for i in order if scene[i]]
    return " , ".join(things) + " ."


def ask(scene: np.ndarray, kind: str, rng: np.random.Generator) -> tuple[str, str]:
    """One question of a kind about a scene (grid²,), and its exact answer. Yes and no are equally likely."""
    places = PLACES[int(len(scene) ** 0.5)]
    full = np.flatnonzero(scene)
    i = rng.choice(full)
    colour, shape = colour_of(scene[i]), shape_of(scene[i])
    if kind == "colour_at":
        return f"what colour is at {places[i]} ?", colour
    if kind == "shape_at":
        return f"what shape is at {places[i]} ?", shape
    if kind == "count":
        return "how many things are there ?", NUMBERS[len(full)]
    if kind == "count_colour":
        asked = colour if rng.random() < 0.7 else rng.choice(COLOUR_NAMES)
        return f"how many {asked} things are there ?", NUMBERS[sum(colour_of(scene[j]) == asked for j in full)]
    if kind == "exists":
        thing = scene[i] if rng.random() < 0.5 else rng.choice(np.setdiff1d(TRAINING_PAIRS, scene))
        return f"is there a {colour_of(thing)} {shape_of(thing)} ?", "yes" if thing in scene else "no"
    if kind == "verify":
        if rng.random() < 0.5:
            colour = rng.choice(
                [colour_of(p) for p in TRAINING_PAIRS if shape_of(p) == shape and colour_of(p) != colour]
            )
        return f"is the {shape} at {places[i]} {colour} ?", "yes" if colour == colour_of(scene[i]) else "no"
    if kind == "relation":
        return _ask_relation(scene, full, rng)
    raise ValueError(f"unknown kind of question '{kind}': choose from {', '.join(QUESTION_KINDS)}")


def _ask_relation(scene: np.ndarray, full: np.ndarray, rng: np.random.Generator) -> tuple[str, str]:
    """Whether one thing is left of, or above, another; each is the only one of its sort, so the answer is exact.

    The two differ in the direction that is asked about, so yes and no are equally likely. A scene without two such
    things is asked whether something exists.
    """
    grid = int(len(scene) ** 0.5)
    single = [k for k in full if np.count_nonzero(scene == scene[k]) == 1]
    if len(single) < 2:
        return ask(scene, "exists", rng)
    i, j = rng.choice(single, size=2, replace=False)
    a, b = (f"{colour_of(scene[k])} {shape_of(scene[k])}" for k in (i, j))
    directions = [("left of", i % grid, j % grid), ("above", i // grid, j // grid)]
    directions = [(relation, at_a, at_b) for relation, at_a, at_b in directions if at_a != at_b]
    relation, at_a, at_b = directions[rng.integers(len(directions))]
    return f"is the {a} {relation} the {b} ?", "yes" if at_a < at_b else "no"


# --- Questions about words alone: what MMLU is to a real model -------------------------------------------------------

OPPOSITES = (
    "hot cold, big small, fast slow, up down, early late, wet dry, open shut, full empty, hard soft, light dark, "
    "high low, loud quiet, rich poor, old young, thick thin, wide narrow, deep shallow, sweet bitter, clean "
    "dirty, strong weak, happy sad, near far, heavy weightless, rough smooth"
)
SEQUENCES = (
    "monday tuesday wednesday thursday friday saturday sunday",
    "january february march april may june july august september october november december",
    "spring summer autumn winter",
)
FACTS = (
    "what colour is grass ? green; what colour is blood ? red; what colour is the sky ? blue; what colour is the "
    "sun ? yellow; what colour is a plum ? purple; what colour is a tomato ? red; what colour is a lemon ? "
    "yellow; what colour is a frog ? green; how many legs has a spider ? eight; how many legs has a cat ? four; "
    "how many legs has a bird ? two; how many legs has an ant ? six; how many legs has a snake ? zero; how many "
    "sides has a triangle ? three; how many sides has a square ? four; how many days has a week ? seven; how many"
    " months has a year ? twelve; how many wheels has a bicycle ? two; what says a cow ? moo; what says a dog ? "
    "woof; what says a cat ? meow; what says a duck ? quack; where does a fish live ? water; where does a bee "
    "live ? hive; where does a bird live ? nest; where does a bear live ? cave; what does a cow eat ? grass; what"
    " does a cat eat ? fish; what does a bear eat ? honey; what does a mouse eat ? cheese"
)


def text_questions() -> dict[str, list[tuple[str, str]]]:
    """Every text-only question and its answer, by kind: arithmetic, opposites, order, facts."""
    pairs = [pair.split() for pair in OPPOSITES.split(", ")]
    lists = [sequence.split() for sequence in SEQUENCES] + [NUMBERS]
    facts = [fact.rpartition("? ") for fact in FACTS.split("; ")]
    return {
        "arithmetic": [
            (f"what is {NUMBERS[a]} plus {NUMBERS[b]} ?", NUMBERS[a + b]) for a in range(10) for b in range(10)
        ],
        "opposites": [(f"what is the opposite of {a} ?", b) for pair in pairs for a, b in (pair, pair[::-1])],
        "order": [
            (f"what comes {word} {x} ?", y)
            for items in lists
            for word, first, second in (("after", items[:-1], items[1:]), ("before", items[1:], items[:-1]))
            for x, y in zip(first, second, strict=True)
        ],
        "facts": [(question + "?", answer) for question, _, answer in facts],
    }


def split_text_questions() -> tuple[list[tuple[str, str, str]], list[tuple[str, str, str]]]:
    """(replayed, tested): lists of (kind, question, answer). The tested ones are never replayed after pretraining."""
    everything = [(kind, q, a) for kind, pairs in text_questions().items() for q, a in pairs]
    return [x for i, x in enumerate(everything) if i % 4], everything[::4]


def vocabulary() -> set[str]:
    """Every word that the world can say, read off its own sentences."""
    rng = np.random.default_rng(0)
    sentences = [f"{question} {answer}" for pairs in text_questions().values() for question, answer in pairs]
    for grid in PLACES:
        for scene in sample_scenes(500, grid, rng):
            sentences.append(f"{DESCRIBE} {describe(scene)}")
            sentences += [" ".join(ask(scene, kind, rng)) for kind in QUESTION_KINDS]
    return set(" ".join(sentences).split())
