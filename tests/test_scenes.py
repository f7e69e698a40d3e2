"""The built-in world: picture, words and answers agree, each read in its own way; what is held out stays out."""

import re
from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minillava import scenes, world
from minillava.world import WorldConfig

seeds = st.integers(0, 2**32 - 1)
grids = st.sampled_from([2, 3])
Scene = dict[str, tuple[str, str]]  # place -> (colour, shape)

COMPASS = {2: "northwest northeast southwest southeast".split(),
           3: "northwest north northeast west centre east southwest south southeast".split()}  # fmt: skip
HELD_OUT = {("red", "cross"), ("green", "triangle"), ("blue", "circle"), ("yellow", "square")}
WORDS = "zero one two three four five six seven eight nine".split()
SMALL = WorldConfig(train_scenes=300, eval_scenes=100, kinds=scenes.QUESTION_KINDS, grid=3, image_size=48)


def heard(description: str) -> Scene:
    """A scene from its words alone."""
    things = [thing.split() for thing in description.removesuffix(" .").split(" , ")]
    assert all(len(thing) == 3 for thing in things)
    return {place: (colour, shape) for place, colour, shape in things}


def seen(picture: np.ndarray, grid: int) -> Scene:
    """A scene from its pixels (3, S, S) alone: ink is what is not grey; its outline tells the shape."""
    side = picture.shape[1] // grid
    scene = {}
    for place, name in enumerate(COMPASS[grid]):
        row, column = divmod(place, grid)
        cell = picture[:, row * side : (row + 1) * side, column * side : (column + 1) * side].astype(float)
        cell = cell.reshape(3, side // 2, 2, side // 2, 2).mean((2, 4))  # the noise is halved
        ink = np.ptp(cell, axis=0) > 45
        if ink.mean() > 0.02:
            mean = cell[:, ink].mean(1)
            colour = min(scenes.COLOURS, key=lambda name: np.abs(mean - scenes.COLOURS[name]).sum())
            scene[name] = (colour, outline(ink))
    return scene


def outline(ink: np.ndarray) -> str:
    """The shape of a mask, by where its box is full: less at the top than below, at the corners, between the arms."""
    rows, columns = np.flatnonzero(ink.sum(1) > 1), np.flatnonzero(ink.sum(0) > 1)
    box = ink[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
    third = len(box) // 3
    if box[:third].sum() < 0.6 * box[-third:].sum():
        return "triangle"

    def full(at: float) -> bool:
        """Whether most points this far from all four corners are ink."""
        near, far = [[round(share * (side - 1)) for side in box.shape] for share in (at, 1 - at)]
        return np.mean([box[y, x] for y in (near[0], far[0]) for x in (near[1], far[1])]) > 0.5

    return "square" if full(0.08) else "circle" if full(0.24) else "cross"


def answer(question: str, scene: Scene) -> str:
    """The truth about a scene, worked out from the words of the question."""
    if match := re.fullmatch(r"what colour is at (\w+) \?", question):
        return scene[match[1]][0]
    if match := re.fullmatch(r"what shape is at (\w+) \?", question):
        return scene[match[1]][1]
    if question == "how many things are there ?":
        return WORDS[len(scene)]
    if match := re.fullmatch(r"how many (\w+) things are there \?", question):
        return WORDS[sum(colour == match[1] for colour, _ in scene.values())]
    if match := re.fullmatch(r"is there a (\w+) (\w+) \?", question):
        return "yes" if match.groups() in scene.values() else "no"
    if match := re.fullmatch(r"is the (\w+) at (\w+) (\w+) \?", question):
        assert scene[match[2]][1] == match[1]
        return "yes" if scene[match[2]][0] == match[3] else "no"
    match = re.fullmatch(r"is the (\w+ \w+) (left of|above) the (\w+ \w+) \?", question)
    assert match, question
    (a,), (b,) = ([p for p, thing in scene.items() if " ".join(thing) == match[k]] for k in (1, 3))  # each is unique
    if match[2] == "left of":
        return "yes" if column_of(a) < column_of(b) else "no"
    return "yes" if row_of(a) < row_of(b) else "no"


def column_of(place: str) -> int:
    return -1 if "west" in place else 1 if "east" in place else 0


def row_of(place: str) -> int:
    return -1 if "north" in place else 1 if "south" in place else 0


def pairs_in(text: str) -> set[tuple[str, str]]:
    """The (colour, shape) pairs that a text puts together."""
    said = set(re.findall(rf"({'|'.join(scenes.COLOURS)}) ({'|'.join(scenes.SHAPES)})", text))
    return said | {(c, s) for s, c in re.findall(r"is the (\w+) at \w+ (\w+) \?", text)}


# ---- agreement


@given(grids, seeds, st.booleans())
def test_words_and_picture_tell_the_same_scene(grid, seed, novel):
    rng = np.random.default_rng(seed)
    cells = scenes.sample_scenes(3, grid, rng, novel)
    pictures = scenes.draw(cells, 64 * grid, rng)
    assert pictures.dtype == np.uint8 and pictures.shape == (3, 3, 64 * grid, 64 * grid)
    for scene, picture in zip(cells, pictures, strict=True):
        told = heard(scenes.describe(scene))
        assert told == seen(picture, grid)
        assert 1 <= len(told) <= grid * grid
        assert heard(scenes.describe(scene, rng.permutation(grid * grid))) == told


@given(grids, seeds, st.booleans(), st.sampled_from(scenes.QUESTION_KINDS))
def test_every_answer_is_true_of_the_words(grid, seed, novel, kind):
    rng = np.random.default_rng(seed)
    for scene in scenes.sample_scenes(20, grid, rng, novel):
        question, given_answer = scenes.ask(scene, kind, rng)
        assert given_answer == answer(question, heard(scenes.describe(scene)))


@pytest.mark.parametrize("grid", [2, 3])
@pytest.mark.parametrize("kind", ["exists", "verify", "relation"])
def test_yes_and_no_are_equally_likely(grid, kind):
    """Within four standard deviations of a fair coin; a model that never looks gets half."""
    rng, n = np.random.default_rng(0), 4000
    yes = sum(scenes.ask(scene, kind, rng)[1] == "yes" for scene in scenes.sample_scenes(n, grid, rng))
    assert abs(yes / n - 0.5) < 4 * 0.5 / n**0.5


def test_every_number_of_things_and_every_place_is_equally_likely():
    n = 9000
    full = scenes.sample_scenes(n, 3, np.random.default_rng(0)) > 0
    counts = np.bincount(full.sum(1), minlength=10)
    assert counts[0] == 0 and (abs(counts[1:] / n - 1 / 9) < 4 * (8 / 81 / n) ** 0.5).all()
    assert (abs(full.mean(0) - 5 / 9) < 4 * (20 / 81 / n) ** 0.5).all()


def test_an_unknown_kind_of_question_is_an_error():
    rng = np.random.default_rng(0)
    with pytest.raises(ValueError, match=r"'smell': choose from colour_at"):
        scenes.ask(scenes.sample_scenes(1, 2, rng)[0], "smell", rng)


# ---- splits


@cache
def split(name: str) -> world.Split:
    return world.build_split(SMALL, name, seed=0)


def texts(samples) -> list[str]:
    return [f"{question} {reply}" for sample in samples for question, reply in sample.turns]


@pytest.mark.parametrize("name", ["train", "selection", "test"])
def test_held_out_pairs_never_occur_in_pictures_or_questions(name):
    rng = np.random.default_rng(0)
    here = split(name)
    assert not HELD_OUT & {thing for scene in here.cells for thing in heard(scenes.describe(scene)).values()}
    asked = texts(world.visual_questions(here, SMALL.kinds, 12, rng)) + texts(world.captions(here))
    assert len(asked) > 1000 and not HELD_OUT & set.union(*map(pairs_in, asked))


def test_held_out_pairs_never_occur_in_what_the_language_model_reads():
    read = texts(world.language_samples(SMALL, 2000, seed=0)) + texts(
        world.instruction_samples(SMALL, split("train"), 0)
    )
    pairs = set.union(*map(pairs_in, read))
    assert not HELD_OUT & pairs
    assert len(pairs) == 24 - 4  # and every other pair does


def test_each_scene_of_the_novel_split_has_a_held_out_pair():
    scenes_told = [heard(scenes.describe(scene)) for scene in split("novel").cells]
    assert all(HELD_OUT & set(scene.values()) for scene in scenes_told)
    assert HELD_OUT <= {thing for scene in scenes_told for thing in scene.values()}


def test_splits_come_from_their_seed_and_differ():
    again = world.build_split(SMALL, "test", seed=0)
    assert (again.cells == split("test").cells).all() and (again.pixels == split("test").pixels).all()
    others = [world.build_split(SMALL, "test", seed=1), split("selection")]
    assert all((other.pixels != again.pixels).any((1, 2, 3)).all() for other in others)
    assert len(split("train").cells) == 300 and len(again.cells) == 100
    with pytest.raises(ValueError, match="'tset': choose from train, selection, test, novel"):
        world.build_split(SMALL, "tset", seed=0)


@pytest.mark.parametrize("kinds", [("colour_at", "count"), scenes.QUESTION_KINDS])
def test_visual_questions_are_about_their_picture(kinds):
    here = split("test")
    samples = world.visual_questions(here, kinds, 4, np.random.default_rng(0))
    for i, sample in enumerate(samples):
        assert sample.images == [i] and len(sample.turns) == len(sample.kinds) == 4
        assert [question.count("<image>") for question, _ in sample.turns] == [1, 0, 0, 0]
        told = heard(scenes.describe(here.cells[i]))
        assert all(answer(question.removeprefix("<image> "), told) == reply for question, reply in sample.turns)
    assert {kind for sample in samples for kind in sample.kinds} == set(kinds)


def test_questions_about_words_can_be_answered_from_their_words():
    rng = np.random.default_rng(0)
    cells = scenes.sample_scenes(200, 3, rng)
    for sample in world.word_questions(cells, scenes.QUESTION_KINDS, 3, rng) + world.retellings(cells, rng):
        told, first = sample.turns[0][0].split(" . ")
        scene = heard(told + " .")
        if sample.kinds == ["retell"]:
            assert first == "describe ." and heard(str(sample.turns[0][1])) == scene
        else:
            questions = [first] + [question for question, _ in sample.turns[1:]]
            replies = [reply for _, reply in sample.turns]
            assert [answer(question, scene) for question in questions] == replies
        assert sample.images == []


# ---- questions about words alone


def test_text_questions_have_one_answer_each_and_it_is_right():
    asked = scenes.text_questions()
    everything = [pair for pairs in asked.values() for pair in pairs]
    assert len({question for question, _ in everything}) == len(everything) > 250
    for question, reply in asked["arithmetic"]:
        _, _, a, _, b, _ = question.split()
        assert scenes.NUMBERS.index(a) + scenes.NUMBERS.index(b) == scenes.NUMBERS.index(reply)
    opposite = {question.split()[5]: reply for question, reply in asked["opposites"]}
    assert all(opposite[opposite[word]] == word != opposite[word] for word in opposite)
    order = dict(asked["order"])
    assert order["what comes after monday ?"] == "tuesday" and order["what comes before three ?"] == "two"
    after = {question.split()[3]: reply for question, reply in asked["order"] if " after " in question}
    assert all(order[f"what comes before {reply} ?"] == word for word, reply in after.items())


def test_tested_text_is_learnt_in_pretraining_and_never_replayed_after_it():
    replayed, tested = scenes.split_text_questions()
    assert sorted(replayed + tested) == sorted((k, q, a) for k, ps in scenes.text_questions().items() for q, a in ps)
    tested_questions = {question for _, question, _ in tested}
    assert {kind for kind, _, _ in tested} == set(scenes.text_questions())
    assert {sample.turns[0][0] for sample in world.tested_text()} == tested_questions
    assert not tested_questions & {question for _, question, _ in replayed}

    def asked(samples) -> set[str]:
        return {question for sample in samples for question, _ in sample.turns}

    assert tested_questions <= asked(world.language_samples(SMALL, 4000, seed=0))
    undrawn = world.Split("train", scenes.sample_scenes(6000, 2, np.random.default_rng(0)), np.empty(0))
    replay = asked(world.instruction_samples(SMALL, undrawn, 0))
    assert not tested_questions & replay
    assert {question for _, question, _ in replayed} <= replay


@pytest.mark.parametrize("seed", [0, 1])
def test_mixtures_have_distinct_ids_and_come_from_their_seed(seed):
    for make in (
        lambda: world.language_samples(SMALL, 400, seed),
        lambda: world.instruction_samples(SMALL, split("train"), seed),
    ):
        samples = make()
        assert len({sample.id for sample in samples}) == len(samples)
        assert all(len(sample.kinds) == len(sample.turns) for sample in samples)
        assert samples == make()
    assert world.language_samples(SMALL, 400, seed) != world.language_samples(SMALL, 400, seed + 1)


def test_the_vocabulary_has_every_word_that_the_world_says():
    said = texts(world.language_samples(SMALL, 3000, seed=3)) + texts(
        world.instruction_samples(SMALL, split("novel"), 3)
    )
    assert {word for text in said for word in text.replace("<image>", "").split()} <= scenes.vocabulary()
