"""Measures against slow, independent ones: exact answers, intervals, losses, cells; and what swapping images does."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest

from minillava import scenes, world
from minillava.data import Batch, Pool, Sample, normalize
from minillava.evaluate import accuracy, cell_accuracy, exact_answers, mean_loss, swap_images, wilson
from minillava.llava import LLaVAConfig, MiniLLaVA
from minillava.lm import LM, LMConfig
from minillava.objectives import CellPool, CellReader, cell_loss, cell_targets, logits_of, next_token_loss
from minillava.tokenizer import ASSISTANT, END, IGNORE, Tokenizer, render
from minillava.train import TrainConfig, fit
from minillava.vit import ViT, ViTConfig

TOKENIZER = Tokenizer.train(scenes.vocabulary())
SIZES = LMConfig(len(TOKENIZER), width=32, depth=1, heads=2, kv_heads=1, hidden=64)
VISION = ViTConfig(width=16, depth=2, heads=2)
SPLIT = world.build_split(world.WorldConfig(eval_scenes=25), "test", 0)
KINDS = ("colour_at", "count")


@pytest.fixture(scope="module")
def model() -> MiniLLaVA:
    """Half-trained, so that some of its answers are right and some are wrong."""
    torch.manual_seed(0)
    model = MiniLLaVA(LLaVAConfig(VISION, SIZES, "aligned"))
    model.set_trainable(2)
    fit(model, next_token_loss, questions(), TrainConfig(steps=120, batch_size=25, lr=5e-3), show=False)
    return model


def questions() -> Pool:
    samples = world.visual_questions(SPLIT, KINDS, 3, np.random.default_rng(0))
    samples += world.tested_text()[:10]
    return Pool(samples, TOKENIZER, VISION.num_patches, pixels=torch.from_numpy(SPLIT.pixels))


# ---- exact answers


def answers_of(row: torch.Tensor, labels: torch.Tensor) -> list[bool]:
    """The same by hand, token by token: an answer is a run of labels, right if each is the best guess before it."""
    found, current = [], None
    for t in range(1, len(labels)):
        if labels[t] == IGNORE:
            if current is not None:
                found.append(current)
            current = None
        else:
            right = int(max(range(row.shape[1]), key=lambda v, t=t: row[t - 1, v].item())) == int(labels[t])
            current = right if current is None else current and right
    return found + ([current] if current is not None else [])


@given(st.integers(0, 2**31), st.integers(1, 4), st.integers(2, 12), st.floats(0, 1))
def test_exact_answers_are_those_of_a_slow_loop(seed, B, T, share):
    rng = np.random.default_rng(seed)
    labels = torch.from_numpy(np.where(rng.random((B, T)) < share, rng.integers(0, 2, (B, T)), IGNORE))
    logits = torch.from_numpy(rng.normal(size=(B, T, 2)))
    batch = Batch(torch.zeros_like(labels), labels, torch.ones_like(labels))
    assert exact_answers(logits, batch) == [answers_of(logits[i], labels[i]) for i in range(B)]


def test_exact_answers_are_what_generation_says(model):
    """Teacher forcing asks about every turn at once; greedy generation, turn by turn with the true turns before it, and
    until it stops by itself, must agree."""
    pool = questions()
    batch = pool.take(range(len(pool)))
    with torch.no_grad():
        quick = exact_answers(logits_of(model, batch), batch)
    for sample, row in zip(pool.samples, quick, strict=True):
        pixels = normalize(torch.from_numpy(SPLIT.pixels[sample.images])) if sample.images else None
        for turn, right in enumerate(row):
            open_turns = [*sample.turns[:turn], (sample.turns[turn][0], None)]
            ids, _ = render(TOKENIZER, open_turns, VISION.num_patches)
            (said,) = model.generate(torch.tensor([ids]), END, pixel_values=pixels, max_new_tokens=8)
            truth = TOKENIZER.encode(sample.turns[turn][1])
            assert (said == truth) == right, sample
    flat = [right for row in quick for right in row]
    assert 0.1 < np.mean(flat) < 0.95, "both outcomes were seen"


def test_accuracy_counts_by_kind(model):
    pool = questions()
    batch = pool.take(range(len(pool)))
    with torch.no_grad():
        right = exact_answers(logits_of(model, batch), batch)
    by_kind: dict[str, list[bool]] = {}
    for sample, row in zip(pool.samples, right, strict=True):
        for kind, value in zip(sample.kinds, row, strict=True):
            by_kind.setdefault(kind, []).append(value)
    measured = accuracy(model, pool, batch_size=7)
    assert measured.keys() == by_kind.keys() | {"all"}
    for kind, values in by_kind.items():
        low, high = wilson(sum(values), len(values))
        expected = {"accuracy": np.mean(values), "low": low, "high": high, "asked": len(values)}
        assert measured[kind] == pytest.approx(expected)
    assert measured["all"]["asked"] == sum(map(len, by_kind.values()))


@pytest.mark.parametrize("size", [1, 2, 12, 100])
def test_the_size_of_a_batch_changes_no_answer(model, size):
    assert accuracy(model, questions(), batch_size=size) == accuracy(model, questions())


# ---- intervals


@given(st.integers(1, 5000).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilsons_interval_is_scipys(counts):
    """scipy's z is 1.959964, ours 1.96: 1e-5 of a share at most."""
    theirs = binomtest(*counts).proportion_ci(method="wilson")
    assert wilson(*counts) == pytest.approx((theirs.low, theirs.high), abs=2e-5)
    low, high = wilson(*counts)
    assert 0 <= low <= counts[0] / counts[1] + 1e-12 and counts[0] / counts[1] - 1e-12 <= high <= 1


def test_no_question_no_knowledge():
    assert wilson(0, 0) == (0.0, 1.0)


# ---- does it look?


def with_features() -> Batch:
    features = torch.arange(25.0)[:, None, None].expand(25, VISION.num_patches, 3)
    samples = world.visual_questions(SPLIT, KINDS, 1, np.random.default_rng(0))
    return Pool([*samples, world.tested_text()[0]], TOKENIZER, 16, features=features).take([4, 25, 7, 9])


def test_each_conversation_gets_another_ones_picture():
    swapped = swap_images(with_features(), "wrong", None)
    assert swapped.features is not None
    assert swapped.features[:, 0, 0].tolist() == [9, 4, 7], "the text in the middle has none, and hands none on"
    pixels = questions().take([0, 1, 2])
    assert torch.equal(swap_images(pixels, "wrong", None).pixels, pixels.pixels[[2, 0, 1]])


def test_a_blank_is_the_same_for_all_and_touches_nothing_else():
    batch = with_features()
    blank = torch.full((1, VISION.num_patches, 3), -1.0)
    swapped = swap_images(batch, "blank", blank)
    assert swapped.features.shape == batch.features.shape and (swapped.features == -1).all()
    assert torch.equal(swapped.input_ids, batch.input_ids) and torch.equal(swapped.labels, batch.labels)
    assert swap_images(batch, "true", None) is batch


@pytest.mark.parametrize("n", [201, 401])
def test_no_conversation_keeps_its_own_picture(n):
    """A last batch of one would hand its picture to itself. The model: it knows the picture's number, and says it."""

    class Numbers(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.lm, self.p = None, torch.nn.Parameter(torch.zeros(()))

        def forward(self, input_ids, document_ids, sample_ids, features):
            logits = torch.zeros(*input_ids.shape, len(TOKENIZER))
            for i, row in enumerate(input_ids):
                place = row.tolist().index(ASSISTANT)
                logits[i, place, int(features[i, 0, 0])] = 1
                logits[i, place + 1, END] = 1
            return logits

    def sample(i: int, answer: str) -> Sample:
        return Sample(str(i), [("<image> what ?", answer)], [i], ["one"])

    red, blue, green = (TOKENIZER.encode(word)[0] for word in ("red", "blue", "green"))
    for odd in (0, n - 1):
        samples = [sample(i, "red" if i == odd else "blue") for i in range(n)]
        features = torch.full((n, 1, 1), float(green))
        features[odd] = red  # the only picture that helps anybody, and it helps its own conversation alone
        pool = Pool(samples, TOKENIZER, 1, features=features)
        assert accuracy(Numbers(), pool)["all"]["accuracy"] == pytest.approx(1 / n)
        assert accuracy(Numbers(), pool, "wrong")["all"]["accuracy"] == 0
    assert blue not in (red, green)


def test_a_model_that_looks_loses_its_answers(model):
    pool = questions()
    pool.samples = pool.samples[:25]
    blank = torch.zeros(1, 3, 32, 32, dtype=torch.uint8)
    scores = [accuracy(model, pool, image, blank)["all"]["asked"] for image in ("true", "blank", "wrong")]
    assert scores == [75, 75, 75]
    with torch.no_grad():
        batch = pool.take(range(25))
        true, other = (logits_of(model, swap_images(batch, image, blank)) for image in ("true", "blank"))
    assert not torch.allclose(true, other), "the swapped pictures reach the model"


def test_nothing_to_measure_is_said(model):
    empty = Pool([], TOKENIZER, 16)
    for measure in (accuracy, mean_loss):
        with pytest.raises(ValueError, match="the pool is empty"):
            measure(model, empty)


# ---- losses


@pytest.mark.parametrize("size", [4, 200])
def test_the_mean_loss_is_cross_entropy_over_all_supervised_tokens(model, size):
    pool = questions()
    batch = pool.take(range(len(pool)))
    with torch.no_grad():
        logits = logits_of(model, batch)[:, :-1]
    by_hand = F.cross_entropy(logits.flatten(0, 1), batch.labels[:, 1:].flatten(), ignore_index=IGNORE).item()
    assert mean_loss(model, pool, size) == pytest.approx(by_hand, rel=1e-5)


def test_the_loss_of_a_bare_language_model_is_the_same_function():
    torch.manual_seed(0)
    lm = LM(SIZES)
    batch = Pool(world.tested_text(), TOKENIZER, 0).take(range(20))
    logits = lm(lm.embed_tokens(batch.input_ids), batch.document_ids)
    expected = sum(
        -F.log_softmax(logits[i, t - 1], -1)[batch.labels[i, t]]
        for i in range(20)
        for t in range(1, batch.labels.shape[1])
        if batch.labels[i, t] != IGNORE
    )
    assert next_token_loss(lm, batch).item() == pytest.approx(expected.item(), rel=1e-5)


# ---- cells


@given(st.lists(st.integers(0, 24), min_size=1, max_size=9))
def test_targets_name_the_colour_and_the_shape(cells):
    colour, shape = cell_targets(torch.tensor([cells]))
    for cell, c, s in zip(cells, colour[0].tolist(), shape[0].tolist(), strict=True):
        if cell == 0:
            assert (c, s) == (0, 0)
        else:
            assert scenes.COLOUR_NAMES[c - 1] == scenes.colour_of(cell)
            assert scenes.SHAPES[s - 1] == scenes.shape_of(cell)


def test_cell_accuracy_counts_cells():
    """A reader that is right about colours in three of four cells and about shapes in all."""
    cells = SPLIT.cells

    class Oracle(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.p = torch.nn.Parameter(torch.zeros(()))

        def forward(self, pixels):
            colour, shape = cell_targets(torch.from_numpy(cells))
            colour = colour.clone()
            colour[:, 0] = (colour[:, 0] + 1) % 7
            return F.one_hot(colour, 7).float(), F.one_hot(shape, 5).float()

    assert cell_accuracy(Oracle(), SPLIT.pixels, cells) == {"colour": 0.75, "shape": 1.0, "both": 0.75}


def test_the_reader_learns_what_is_in_each_cell():
    """Ten pictures by heart; and its loss is the sum over cells that the training loop divides by."""
    torch.manual_seed(0)
    reader = CellReader(ViT(VISION), 2)
    pool = CellPool(SPLIT.pixels[:10], SPLIT.cells[:10])
    batch = pool.batch(0, 10, 0)
    assert batch.supervised == 10 * 4 * 2
    first = (cell_loss(reader, batch) / batch.supervised).item()
    assert first == pytest.approx((np.log(7) + np.log(5)) / 2, rel=0.3), "near even guessing"
    fit(reader, cell_loss, pool, TrainConfig(steps=120, batch_size=10, lr=3e-3), show=False)
    assert cell_accuracy(reader, SPLIT.pixels[:10], SPLIT.cells[:10])["both"] > 0.9
