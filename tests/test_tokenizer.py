"""Words to ids and back, and the one render(): what is generated from is what was trained on."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minillava import scenes, world
from minillava.tokenizer import ASSISTANT, END, IGNORE, IMAGE, PAD, UNKNOWN, USER, Tokenizer, render, world_tokenizer

SPECIAL = {PAD, END, IMAGE, USER, ASSISTANT}
TOKENIZER = Tokenizer.train(scenes.vocabulary())

marks = st.sampled_from(
    ["<pad>", "<end>", "</s>", "<s>", "<unk>", "<image>", "<user>", "<assistant>", "<0x0A>", "\u2581"]
)
texts = st.lists(st.text() | marks | st.sampled_from(sorted(scenes.vocabulary())), max_size=8).map("".join)
words = st.lists(st.sampled_from(sorted(scenes.vocabulary())), min_size=1, max_size=12).map(" ".join)
questions = st.lists(words, min_size=1, max_size=3).map(" <image> ".join)  # with up to two marks
turns = st.lists(st.tuples(questions, words), min_size=1, max_size=4)


def test_every_word_of_the_world_is_one_piece():
    """And each has an id of its own."""
    ids = {word: TOKENIZER.encode(word) for word in scenes.vocabulary()}
    assert all(len(pieces) == 1 for pieces in ids.values())
    assert len({pieces[0] for pieces in ids.values()}) == len(ids)
    assert not {pieces[0] for pieces in ids.values()} & (SPECIAL | {UNKNOWN})


@given(words)
def test_a_sentence_of_the_world_is_as_long_as_its_words_and_comes_back(sentence):
    ids = TOKENIZER.encode(sentence)
    assert len(ids) == len(sentence.split())
    assert TOKENIZER.decode(ids) == sentence
    assert TOKENIZER.encode(sentence.upper()) == ids


@given(st.integers(0, 2**32 - 1))
def test_what_the_world_says_comes_back(seed):
    config = world.WorldConfig(kinds=scenes.QUESTION_KINDS, grid=3)
    for sample in world.language_samples(config, 8, seed):
        for text in (text for turn in sample.turns for text in turn):
            assert TOKENIZER.decode(TOKENIZER.encode(str(text))) == text


@given(st.from_regex(r"[a-z0-9.,?!:;'\"()\-/&+%#]+( [a-z0-9.,?!:;'\"()\-/&+%#]+)*", fullmatch=True))
def test_any_plain_text_comes_back_letter_by_letter_if_need_be(text):
    ids = TOKENIZER.encode(text)
    assert UNKNOWN not in ids and TOKENIZER.decode(ids) == text


@given(texts)
def test_no_text_reaches_a_special_id(text):
    assert not SPECIAL & set(TOKENIZER.encode(text))


@given(texts, texts)
def test_in_a_rendered_conversation_only_render_puts_special_ids(question, answer):
    ids, _ = render(TOKENIZER, [(question, answer)], 5)
    counts = {special: ids.count(special) for special in SPECIAL}
    assert counts == {PAD: 0, END: 1, IMAGE: 5 * question.count("<image>"), USER: 1, ASSISTANT: 1}
    assert ids[0] == USER and ids[-1] == END


def test_decoding_leaves_special_ids_out():
    red = TOKENIZER.encode("red")
    assert TOKENIZER.decode([USER, IMAGE, IMAGE, *red, ASSISTANT, *red, END, PAD]) == "red red"
    assert TOKENIZER.decode([]) == ""


def test_training_is_deterministic_and_indifferent_to_order():
    vocabulary = sorted(scenes.vocabulary())
    assert Tokenizer.train(vocabulary[::-1] + vocabulary).model == TOKENIZER.model
    assert len(Tokenizer.train(["red"])) < len(TOKENIZER) < len(vocabulary) + 128


def test_the_world_tokenizer_is_cached_and_the_cache_is_what_was_trained(tmp_path):
    first = world_tokenizer(tmp_path / "cache")
    (file,) = (tmp_path / "cache").iterdir()
    before = file.stat()
    assert world_tokenizer(tmp_path / "cache").model == first.model == TOKENIZER.model
    assert file.stat().st_mtime_ns == before.st_mtime_ns
    assert Tokenizer.load(file).encode("red circle") == TOKENIZER.encode("red circle")


def test_a_missing_file_and_a_foreign_model_are_errors(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"none\.model: no tokenizer there"):
        Tokenizer.load(tmp_path / "none.model")
    import io

    import sentencepiece

    foreign = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["some text"]), model_writer=foreign, model_type="char", vocab_size=12, minloglevel=2
    )
    with pytest.raises(ValueError, match="not one of our sentencepiece models"):
        Tokenizer(foreign.getvalue())


# ---- render


@given(turns, st.integers(0, 6))
def test_ids_and_labels_are_of_equal_length_and_agree(conversation, image_tokens):
    """Supervised are the answers and their ends, and nothing else; a supervised label is the id at its place."""
    ids, labels = render(TOKENIZER, conversation, image_tokens)
    assert len(ids) == len(labels)
    assert all(label in (IGNORE, token) for token, label in zip(ids, labels, strict=True))
    supervised = [label for label in labels if label != IGNORE]
    assert supervised == [token for _, answer in conversation for token in [*TOKENIZER.encode(answer), END]]
    assert ids.count(IMAGE) == image_tokens * sum(question.count("<image>") for question, _ in conversation)


@given(turns, st.integers(0, 6), st.data())
def test_a_prompt_is_a_strict_prefix_of_what_is_trained_on(conversation, image_tokens, data):
    """At every turn: what generation starts from, training has seen, and there the first answer token is supervised."""
    turn = data.draw(st.integers(0, len(conversation) - 1))
    question, answer = conversation[turn]
    ids, labels = render(TOKENIZER, conversation, image_tokens)
    prompt, prompt_labels = render(TOKENIZER, [*conversation[:turn], (question, None)], image_tokens)
    assert ids[: len(prompt)] == prompt and len(prompt) < len(ids)
    assert prompt[-1] == ASSISTANT
    reply = [*TOKENIZER.encode(answer), END]
    assert labels[len(prompt) : len(prompt) + len(reply)] == ids[len(prompt) : len(prompt) + len(reply)] == reply
    assert prompt_labels == labels[: len(prompt)]


def test_image_tokens_stand_where_the_mark_stands():
    red, what = TOKENIZER.encode("red"), TOKENIZER.encode("what")
    image = [IMAGE] * 2
    expected = {
        "<image> red": [*image, *red],
        "<image>\nred": [*image, *red],
        "red <image>": [*red, *image],
        "red\n<image>": [*red, *image],
        "red <image> what": [*red, *image, *what],
        "<image><image>red": [*image, *image, *red],
        "<image>": image,
        "red": red,
    }
    for question, ids in expected.items():
        assert render(TOKENIZER, [(question, None)], 2)[0] == [USER, *ids, ASSISTANT]
