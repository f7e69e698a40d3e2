"""Pools and batches: a batch depends on the step alone, epochs are permutations, and errors name the sample."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minillava import scenes, world
from minillava.data import Batch, Pool, Sample, normalize, shuffled
from minillava.tokenizer import END, IGNORE, IMAGE, PAD, Tokenizer, render

TOKENIZER = Tokenizer.train(scenes.vocabulary())
SPLIT = world.build_split(world.WorldConfig(eval_scenes=40, image_size=8), "test", seed=0)
SAMPLES = world.visual_questions(SPLIT, ("colour_at", "count"), 2, np.random.default_rng(0)) + world.tested_text()
PIXELS = torch.from_numpy(SPLIT.pixels)
POOL = Pool(SAMPLES, TOKENIZER, 4, PIXELS)

rows_of = st.lists(st.integers(0, len(SAMPLES) - 1), min_size=1, max_size=6)


def same(a: Batch, b: Batch) -> bool:
    return a.sample_ids == b.sample_ids and all(
        torch.equal(getattr(a, name), getattr(b, name)) for name in ("input_ids", "labels", "document_ids", "pixels")
    )


# ---- batches


@given(rows_of)
def test_a_batch_holds_its_samples_and_padding(rows):
    batch = POOL.take(rows)
    rendered = [render(TOKENIZER, SAMPLES[row].turns, 4) for row in rows]
    assert batch.input_ids.shape == (len(rows), max(len(ids) for ids, _ in rendered))
    for i, (ids, labels) in enumerate(rendered):
        length = len(ids)
        assert batch.input_ids[i, :length].tolist() == ids and batch.labels[i, :length].tolist() == labels
        assert (batch.input_ids[i, length:] == PAD).all() and (batch.labels[i, length:] == IGNORE).all()
        assert batch.document_ids[i].tolist() == [1] * length + [0] * (batch.input_ids.shape[1] - length)
    assert batch.sample_ids == [SAMPLES[row].id for row in rows]


@given(rows_of)
def test_images_come_in_the_order_of_their_placeholders(rows):
    batch = POOL.take(rows)
    expected = [image for row in rows for image in SAMPLES[row].images]
    assert batch.pixels is not None and torch.equal(batch.pixels, PIXELS[torch.tensor(expected, dtype=torch.long)])
    assert int((batch.input_ids == IMAGE).sum()) == 4 * len(expected)


@given(rows_of)
def test_the_loss_averages_over_answers_and_their_ends(rows):
    words = sum(len(str(answer).split()) + 1 for row in rows for _, answer in SAMPLES[row].turns)
    assert POOL.take(rows).supervised == words


def test_features_stand_in_for_pixels():
    features = torch.randn(len(PIXELS), 4, 6)
    batch = Pool(SAMPLES, TOKENIZER, 4, PIXELS, features).take([3, 0])
    assert batch.pixels is None and torch.equal(batch.images()["features"], features[[3, 0]])
    assert batch.images(torch.bfloat16)["features"].dtype == torch.bfloat16


def test_a_batch_of_text_asks_for_no_image():
    text = len(SAMPLES) - 1
    assert POOL.take([text]).images() == {}
    assert Pool(SAMPLES[text:], TOKENIZER, 4).take([0]).images() == {}
    assert Pool(SAMPLES, TOKENIZER, 4, features=torch.ones(40, 4, 6)).take([text]).images() == {}


def test_pixels_are_normalised_to_minus_one_and_one():
    assert normalize(torch.tensor([0, 255], dtype=torch.uint8)).tolist() == [-1, 1]
    images = POOL.take([0]).images()
    assert set(images) == {"pixel_values"} and torch.equal(images["pixel_values"], normalize(PIXELS[:1]))


def test_moving_a_batch_keeps_everything():
    batch = POOL.take([0, len(SAMPLES) - 1])
    assert same(batch.to("cpu"), batch)
    moved = batch.to("meta")
    assert moved.input_ids.device.type == moved.pixels.device.type == "meta" and moved.sample_ids == batch.sample_ids


# ---- order


@given(st.integers(1, 60), st.integers(1, 70), st.integers(0, 10**6), st.integers(0, 5))
def test_epochs_are_permutations(n, batch_size, seed, epoch):
    """Each epoch shows every row once, in an order of its own; fewer than a batch are left out at its end."""
    size = min(batch_size, n)
    steps = n // size
    shown = np.concatenate([shuffled(n, epoch * steps + step, batch_size, seed) for step in range(steps)])
    assert len(shown) == steps * size > n - size
    assert len(set(shown)) == len(shown) and set(shown) <= set(range(n))


def test_epochs_and_seeds_shuffle_differently():
    orders = [tuple(shuffled(50, epoch, 50, seed)) for epoch in range(3) for seed in range(3)]
    assert len(set(orders)) == 9


@given(st.integers(0, 500), st.integers(1, 8), st.integers(0, 100))
def test_a_batch_is_a_pure_function_of_its_step(step, batch_size, seed):
    """Whatever was asked for before, and from whichever pool of the same samples."""
    again = Pool(SAMPLES, TOKENIZER, 4, PIXELS)
    again.batch(step + 3, batch_size, seed)
    assert same(POOL.batch(step, batch_size, seed), again.batch(step, batch_size, seed))


# ---- errors


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        (Sample("cat-7", [("what ?", "red")], [0]), r"sample 'cat-7': 0 <image> mark\(s\) but 1 image"),
        (Sample("cat-7", [("<image> what ?", "red")]), r"sample 'cat-7': 1 <image> mark\(s\) but 0 image"),
        (Sample("cat-7", [("<image> <image> ?", "red")], [0]), r"sample 'cat-7': 2 <image> mark\(s\) but 1 image"),
        (Sample("cat-7", [("what ?", "<image>")], [0]), r"sample 'cat-7': 0 <image> mark\(s\) but 1 image"),
        (Sample("cat-7", [("<image> what ?", None)], [0]), "sample 'cat-7': no supervised token"),
        (Sample("cat-7", []), "sample 'cat-7': no supervised token"),
    ],
)
def test_errors_name_the_sample(sample, message):
    with pytest.raises(ValueError, match=message):
        Pool([*SAMPLES, sample], TOKENIZER, 4, PIXELS)


def test_a_pool_of_nothing_says_so_when_it_is_asked_for_a_batch():
    with pytest.raises(ValueError, match="no samples"):
        Pool([], TOKENIZER, 4).batch(0, 8, 0)
    with pytest.raises(ValueError, match="batch of 0"):
        POOL.batch(0, 0, 0)


def test_one_long_conversation_does_not_pad_all_others():
    short = Sample("short", [("a", "b")])
    long = Sample("long", [("a " * 500, "b")])
    pool = Pool([short] * 1000 + [long], TOKENIZER, 4)
    stored = sum(tensor.numel() * tensor.element_size() for tensor in (pool.input_ids, pool.labels))
    assert stored == 8 * int(pool.lengths.sum()) < 1001 * int(pool.lengths.max())


def test_every_row_teaches_at_least_an_end():
    for labels, sample in zip(POOL.labels.split(POOL.lengths.tolist()), SAMPLES, strict=True):
        assert (labels == END).sum() == len(sample.turns)
