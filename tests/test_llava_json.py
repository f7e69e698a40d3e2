"""Real input: JSON in LLaVA's format, whatever its size, and pictures, whatever their mode, through the same Pool."""

import json
import os
import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from minillava import json_stream
from minillava.data import Pool, Sample
from minillava.json_stream import records
from minillava.llava_json import load_pixels, read_folder, read_picture
from minillava.scenes import vocabulary
from minillava.tokenizer import IGNORE, IMAGE, Tokenizer

RED, BLUE, WHITE = (255, 0, 0), (0, 0, 255), (255, 255, 255)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(vocabulary())


def conversation(*values: str, system: str | None = None) -> list[dict]:
    roles = ["human", "gpt"] * len(values)
    spoken = [{"from": role, "value": value} for role, value in zip(roles, values, strict=False)]
    return ([{"from": "system", "value": system}] if system else []) + spoken


def write(folder, samples, name="data.json"):
    (folder / name).write_text(json.dumps(samples))
    return folder


# ---- JSON, streamed

texts = st.text(max_size=5)  # any character but a lone surrogate
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=2),
    max_leaves=6,
)


@given(st.lists(values, max_size=4), st.sampled_from([None, 1, "\t"]), st.integers(1, 40), st.booleans())
def test_a_list_streams_to_what_json_loads_makes_of_it(tmp_path_factory, elements, indent, chunk, ascii_only):
    """However the chunks cut it: inside numbers, escapes, between an element and its comma."""
    file = tmp_path_factory.getbasetemp() / "stream.json"
    file.write_text(json.dumps(elements, indent=indent, ensure_ascii=ascii_only) + "\n", encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_stream, "CHUNK", chunk)
        assert list(records(file)) == elements


@pytest.mark.parametrize("chunk", range(1, 12))
def test_no_chunk_cuts_a_number_in_two(tmp_path, monkeypatch, chunk):
    """'[0' is a whole number until the '.5' arrives."""
    monkeypatch.setattr(json_stream, "CHUNK", chunk)
    file = tmp_path / "numbers.json"
    file.write_text("[0.5, 12, 1e3, -7, 1234567890]")
    assert list(records(file)) == [0.5, 12, 1000.0, -7, 1234567890]


@given(st.lists(st.dictionaries(texts, values, max_size=2), max_size=4))
def test_lines_stream_to_their_objects(tmp_path_factory, elements):
    file = tmp_path_factory.getbasetemp() / "stream.jsonl"
    file.write_text("\n\n".join(json.dumps(element) for element in elements), encoding="utf-8")
    assert list(records(file)) == elements


@given(st.lists(values, min_size=1, max_size=4), st.data())
def test_a_list_cut_anywhere_gives_a_prefix_and_one_error(tmp_path_factory, elements, data):
    text = json.dumps(elements)
    cut = data.draw(st.integers(1, len(text) - 1))
    file = tmp_path_factory.getbasetemp() / "cut.json"
    file.write_text(text[:cut], encoding="utf-8")
    *whole, last = records(file)
    assert whole == elements[: len(whole)]
    assert isinstance(last, ValueError)


@pytest.mark.parametrize(
    "text",
    ["[1 2]", "[1,]", "[,1]", "[1]]", "[1] [2]", "[tru]", "[" * 5000, '{"a": 1', "nonsense", "[1, " + "9" * 5000],
)
def test_what_is_not_json_ends_in_one_error(tmp_path, text):
    file = tmp_path / "bad.json"
    file.write_text(text)
    errors = [record for record in records(file) if isinstance(record, ValueError)]
    assert len(errors) == 1 and "not JSON" in str(errors[0])


def test_a_broken_line_does_not_hide_the_next(tmp_path):
    file = tmp_path / "data.jsonl"
    file.write_text('{"a": 1}\n{"a": \n{"a": 3}\n')
    first, broken, last = records(file)
    assert (first, last) == ({"a": 1}, {"a": 3})
    assert isinstance(broken, ValueError)


def test_streaming_holds_one_element_and_not_the_file(tmp_path):
    """40 MB of conversations in under 12 MB: a chunk, its decoded text, one element."""
    file = tmp_path / "long.json"
    element = json.dumps({"id": "x", "value": "word " * 400})
    with open(file, "w") as out:
        out.write("[" + element)
        for _ in range(20_000):
            out.write("," + element)
        out.write("]")
    assert file.stat().st_size > 40_000_000
    tracemalloc.start()
    count = sum(1 for _ in records(file))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count == 20_001
    assert peak < 12_000_000


def test_an_endless_element_is_given_up_and_not_read_to_the_end(tmp_path, monkeypatch):
    monkeypatch.setattr(json_stream, "LONGEST", 1 << 16)
    monkeypatch.setattr(json_stream, "CHUNK", 1 << 12)
    for name, start in (("list.json", '[{}, {"id": "'), ("lines.jsonl", '{}\n{"id": "')):
        file = tmp_path / name
        file.write_text(start + "x" * 10_000_000)
        tracemalloc.start()
        _, only = records(file)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert isinstance(only, ValueError)
        assert peak < 1_000_000


# ---- samples


def test_turns_images_and_marks_of_every_sort(tmp_path):
    for name in ("a.png", "b.jpg"):
        Image.new("RGB", (4, 4)).save(tmp_path / name)
    write(
        tmp_path,
        [
            {"id": "start", "image": "a.png", "conversations": conversation("<image>\nwhat ?", "red")},
            {"id": "end", "image": "b.jpg", "conversations": conversation("what ?\n<image>", "red")},
            {"id": 7, "image": ["b.jpg", "./a.png"], "conversations": conversation("<image> or <image> ?", "red")},
            {"id": "text", "conversations": conversation("one ?", "two", "three ?", "four", system="be short")},
            {"id": "later", "image": "a.png", "conversations": conversation("one ?", "two", "and <image> ?", "red")},
            {"id": "open", "conversations": conversation("one ?", "two", "three ?")},
        ],
    )
    samples, files = read_folder(tmp_path)
    assert [file.name for file in files] == ["a.png", "b.jpg"]  # distinct, in order of appearance
    assert {sample.id: sample.images for sample in samples} == {
        "start": [0], "end": [1], "7": [1, 0], "text": [], "later": [0], "open": [],
    }  # fmt: skip
    by_id = {sample.id: sample.turns for sample in samples}
    assert by_id["text"] == [("be short\none ?", "two"), ("three ?", "four")]
    assert by_id["open"] == [("one ?", "two"), ("three ?", None)]


def test_a_pool_makes_of_a_folder_what_it_makes_of_the_world(tmp_path, tokenizer):
    """The same words give the same ids and labels, wherever they come from; the pixels are the files'."""
    Image.new("RGB", (8, 8), RED).save(tmp_path / "red.png")
    Image.new("RGB", (8, 8), BLUE).save(tmp_path / "blue.png")
    two = conversation("<image>\nwhat colour is at north ?", "red", "<image> how many things are there ?", "two")
    write(tmp_path, [{"id": "x", "image": ["red.png", "blue.png"], "conversations": two}])
    samples, files = read_folder(tmp_path)
    batch = Pool(samples, tokenizer, 3, load_pixels(files, 16)).take([0])

    turns: list[tuple[str, str | None]] = [
        ("<image> what colour is at north ?", "red"),
        ("<image> how many things are there ?", "two"),
    ]
    expected = Pool([Sample("x", turns, [0, 1])], tokenizer, 3).take([0])
    assert batch.input_ids.tolist() == expected.input_ids.tolist()
    assert batch.labels.tolist() == expected.labels.tolist()
    assert int((batch.input_ids == IMAGE).sum()) == 6 and batch.supervised == 4
    assert (batch.labels[batch.input_ids == IMAGE] == IGNORE).all()
    assert batch.pixels is not None and batch.pixels.shape == (2, 3, 16, 16)
    assert batch.pixels.float().mean((2, 3)).tolist() == [list(RED), list(BLUE)]


def test_the_first_bad_sample_stops_the_reading_and_is_named(tmp_path):
    write(
        tmp_path,
        [
            {"id": "good", "conversations": conversation("one ?", "two")},
            {"id": "cat-7", "image": "cats/7.png", "conversations": conversation("<image> ?", "a cat")},
        ],
    )
    with pytest.raises(ValueError, match=r"cats/7\.png: sample 'cat-7': no such image.*check-data"):
        read_folder(tmp_path)


def test_of_several_json_files_one_must_be_named(tmp_path):
    sample = {"id": "a", "conversations": conversation("one ?", "two")}
    write(tmp_path, [sample], "train.json")
    write(tmp_path, [sample | {"id": "b"}], "heldout.json")
    with pytest.raises(ValueError, match=r"heldout\.json, train\.json"):
        read_folder(tmp_path)
    assert [s.id for s in read_folder(tmp_path / "heldout.json")[0]] == ["b"]
    with pytest.raises(ValueError, match=r"nowhere: no \.json"):
        read_folder(tmp_path / "nowhere")


def test_the_clip_art_that_ships_is_whole(request):
    """300 distinct captions and pictures; every held-out word is said in training, no held-out caption is."""
    folder = request.config.rootpath / "examples" / "clipart"
    (train, train_files), (held_out, held_out_files) = (read_folder(folder / f"{n}.json") for n in ("train", "heldout"))
    assert (len(train), len(held_out)) == (250, 50)
    said, asked = ([str(s.turns[0][1]) for s in samples] for samples in (train, held_out))
    assert len({*said, *asked}) == len({*train_files, *held_out_files}) == 300
    assert {w for caption in asked for w in caption.split()} <= {w for caption in said for w in caption.split()}
    pixels = load_pixels(train_files + held_out_files, 64)
    assert len(torch.unique(pixels.flatten(1), dim=0)) == 300
    assert (pixels[:, :, 0] == 255).all()  # on white
    assert sum(os.path.getsize(file) for file in train_files + held_out_files) < 1_500_000


# ---- pictures


def pixels_of(picture: Image.Image, tmp_path, size: int = 16, name: str = "x.png", **options) -> np.ndarray:
    picture.save(tmp_path / name, **options)
    return read_picture(tmp_path / name, size).transpose(1, 2, 0)  # (S, S, 3)


@given(st.integers(1, 90), st.integers(1, 90), st.integers(1, 40))
def test_a_picture_is_padded_and_never_cropped(tmp_path_factory, width, height, size):
    """White appears beside it only, the picture keeps its proportions, and all of it is there."""
    tmp_path = tmp_path_factory.getbasetemp()
    square = pixels_of(Image.new("RGB", (width, height), RED), tmp_path, size)
    ink = (square == RED).all(-1)
    assert ((square == WHITE).all(-1) | ink).all()
    rows, columns = ink.any(1).sum(), ink.any(0).sum()
    assert ink.sum() == rows * columns and max(rows, columns) == size
    assert min(rows, columns) == max(1, round(min(width, height) * size / max(width, height)))
    margins = np.flatnonzero(ink.any(1))[[0, -1]], np.flatnonzero(ink.any(0))[[0, -1]]
    assert all(abs(first - (size - 1 - last)) <= 1 for first, last in margins)  # centred


def test_corners_of_a_picture_stay_in_their_corners(tmp_path):
    picture = Image.new("RGB", (32, 32), WHITE)
    picture.paste(RED, (0, 0, 16, 16))
    picture.paste(BLUE, (16, 16, 32, 32))
    square = pixels_of(picture, tmp_path)
    assert square[1, 1].tolist() == list(RED) and square[14, 14].tolist() == list(BLUE)
    assert square[1, 14].tolist() == square[14, 1].tolist() == list(WHITE)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_respected(tmp_path, orientation):
    """Red at the top left of what was photographed, however the camera was held (rows and columns as in TIFF 6.0)."""
    upright = np.full((32, 32, 3), 255, np.uint8)
    upright[:16, :16] = RED
    turn = {1: lambda a: a, 2: lambda a: a[:, ::-1], 3: lambda a: a[::-1, ::-1], 4: lambda a: a[::-1],
            5: lambda a: a.swapaxes(0, 1), 6: lambda a: np.rot90(a, 1), 7: lambda a: a[::-1, ::-1].swapaxes(0, 1),
            8: lambda a: np.rot90(a, -1)}  # fmt: skip
    exif = Image.Exif()
    exif[0x0112] = orientation
    stored = Image.fromarray(np.ascontiguousarray(turn[orientation](upright)))
    square = pixels_of(stored, tmp_path, name="x.jpg", exif=exif, quality=100).astype(int)
    assert abs(square[3, 3] - RED).max() < 16
    assert all(abs(square[r, c] - WHITE).max() < 16 for r, c in ((3, 12), (12, 3), (12, 12)))


def test_every_mode_comes_out_as_seen_on_white_paper(tmp_path):
    half = Image.new("RGBA", (4, 4), (*BLUE, 128))
    assert pixels_of(half, tmp_path)[8, 8].tolist() == [127, 127, 255]
    assert pixels_of(Image.new("LA", (4, 4), (0, 0)), tmp_path)[8, 8].tolist() == list(WHITE)
    palette = Image.new("P", (4, 4), 1)
    palette.putpalette([*BLUE, *RED])
    assert pixels_of(palette, tmp_path)[8, 8].tolist() == list(RED)
    assert pixels_of(palette, tmp_path, transparency=1)[8, 8].tolist() == list(WHITE)
    assert pixels_of(Image.new("L", (4, 4), 77), tmp_path)[8, 8].tolist() == [77] * 3
    assert pixels_of(Image.new("1", (4, 4), 1), tmp_path)[8, 8].tolist() == list(WHITE)
    grey16 = Image.fromarray(np.full((4, 4), 0x4D00, np.uint16))
    assert pixels_of(grey16, tmp_path)[8, 8].tolist() == [0x4D] * 3
    cmyk = pixels_of(Image.new("CMYK", (64, 64), (0, 255, 255, 0)), tmp_path, name="x.jpg")
    assert abs(cmyk[8, 8].astype(int) - RED).max() < 8


def test_load_pixels_names_the_file_it_cannot_read(tmp_path):
    (tmp_path / "x.png").write_bytes(b"not a picture")
    with pytest.raises(ValueError, match=r"x\.png: corrupt.*check-data"):
        load_pixels([tmp_path / "x.png"], 8)
    assert load_pixels([], 8).shape == (0, 3, 8, 8)
