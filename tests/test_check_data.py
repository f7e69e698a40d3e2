"""check-data: whatever is wrong with a sample gives one line with its id and path, and nothing stops the reading."""

import io
import json
import os
import signal
import struct
import warnings
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from minillava.check_data import Report, check_data
from minillava.llava_json import load_pixels, read_folder
from minillava.scenes import vocabulary
from minillava.tokenizer import Tokenizer

TOKENIZER = Tokenizer.train(vocabulary())
SPOKEN = [{"from": "human", "value": "<image>\nwhat colour ?"}, {"from": "gpt", "value": "red"}]
TEXT = [{"from": "human", "value": "what is one plus one ?"}, {"from": "gpt", "value": "two"}]


def encoded(format: str, size: tuple[int, int] = (32, 24)) -> bytes:
    noise = np.random.default_rng(0).integers(0, 255, (*size[::-1], 3), dtype=np.uint8)
    out = io.BytesIO()
    Image.fromarray(noise).save(out, format)
    return out.getvalue()


PNG, JPEG = encoded("PNG"), encoded("JPEG")


def png_of_size(width: int, height: int) -> bytes:
    """A PNG that claims to be huge and holds next to nothing."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0" * 99)) + chunk(b"IEND", b"")
    )


@pytest.fixture
def folder(tmp_path) -> Path:
    """A data folder, and beside it things that must never be read."""
    inside = tmp_path / "data"
    (inside / "images").mkdir(parents=True)
    (inside / "images" / "good.png").write_bytes(PNG)
    (tmp_path / "secret.png").write_bytes(PNG)
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "secret.png").write_bytes(PNG)
    return inside


GOOD = {"id": "good", "image": "images/good.png", "conversations": SPOKEN}
LAST = {"id": "last", "conversations": TEXT}


def check(folder: Path, *samples, full: bool = True) -> Report:
    (folder / "data.json").write_text(json.dumps(samples))
    return check_data(folder, 4, TOKENIZER, full)


def only(report: Report) -> tuple[str, str, str]:
    """The one problem of a report; its one line names id and path, and the last line counts."""
    (problem,) = report.problems
    line, count = report.lines()
    assert problem.id in line and problem.path in line and problem.message in line
    assert line.isprintable() and count.endswith("1 problem(s)")
    return problem


def test_a_good_folder_has_no_problem_and_is_counted(folder):
    report = check(folder, GOOD, {**GOOD, "id": "again"}, LAST)
    assert report.problems == [] and (report.samples, report.images) == (3, 1)
    assert report.longest == 2 + 4 + 3 + 2  # two roles, the image, 'what colour ?', 'red' and the end
    assert str(report).count("\n") == 0


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize(
    ("sample", "message"),
    [
        ({"image": "images/none.png"}, "no such image"),
        ({"image": "../secret.png"}, "without '..'"),
        ({"image": "images/../images/good.png"}, "without '..'"),
        ({"image": "/etc/hostname"}, "relative"),
        ({"image": ""}, "relative"),
        ({"image": "images/good.png\0.jpg"}, "relative"),
        ({"image": "images"}, "not a regular file"),
        ({"image": "images/good.png/x.png"}, "no such image"),
        ({"image": "x" * 5000}, "can't be opened"),
        ({"image": 7}, "not a number"),
        ({"image": ["images/good.png", None]}, "not missing or null"),
        ({"image": {"path": "images/good.png"}}, "not an object"),
        ({"image": ["images/good.png", "images/good.png"]}, "1 <image> mark(s) in its questions but 2 image(s)"),
        ({"image": None}, "1 <image> mark(s) in its questions but 0 image(s)"),
        ({"conversations": TEXT}, "0 <image> mark(s)"),
        ({"conversations": None}, "must be a list"),
        ({"conversations": "hello"}, "must be a list"),
        ({"conversations": ["hello"]}, "message 1 must be an object"),
        ({"conversations": [*SPOKEN, {"from": "human"}]}, "message 3 must be an object"),
        ({"conversations": [{"from": ["human"], "value": "<image>"}]}, "message 1 must be an object"),
        ({"conversations": [*SPOKEN, {"from": "USER", "value": "?"}]}, "unknown role 'USER'"),
        ({"conversations": SPOKEN[::-1]}, "message 1 is from gpt, not from human"),
        ({"conversations": [*SPOKEN, SPOKEN[1]]}, "message 3 is from gpt"),
        ({"conversations": [*SPOKEN, {"from": "system", "value": "?"}]}, "message 3 is from system"),
        ({"conversations": SPOKEN[:1]}, "no supervised token"),
        ({"conversations": [SPOKEN[0], {"from": "gpt", "value": " \n"}]}, "no supervised token"),
        ({"conversations": []}, "1 image(s)"),
        ({"conversations": [SPOKEN[0], {"from": "gpt", "value": "\ud83d"}]}, "message 2 is not valid UTF-8"),
        ({"image": "images/\udcff.png"}, "not valid UTF-8"),
    ],
)
def test_each_bad_sample_gives_one_line_and_its_neighbours_none(folder, sample, message, full):
    bad = {"id": "bad", "image": "images/good.png", "conversations": SPOKEN, **sample}
    report = check(folder, GOOD, bad, LAST, full=full)
    found = only(report)
    assert found.id == "bad" and message in found.message
    assert report.samples == 3
    with pytest.raises(ValueError, match="sample 'bad'"):  # training refuses what checking names
        read_folder(folder)


@pytest.mark.parametrize(
    ("sample", "name", "message"),
    [
        ([1, 2], "#2", "must be an object"),
        (None, "#2", "must be an object"),
        ({"conversations": TEXT}, "#2", "'id' must be"),
        ({"id": True, "conversations": TEXT}, "#2", "'id' must be"),
        ({"id": 1.5, "conversations": TEXT}, "#2", "'id' must be"),
        ({"id": "a\nb\x1b[2J", "conversations": []}, "a\\nb\\x1b[2J", "no supervised token"),
    ],
)
def test_a_sample_without_a_usable_id_is_named_by_its_place(folder, sample, name, message):
    found = only(check(folder, GOOD, sample, LAST))
    assert found.id == name and found.path == "data.json" and message in found.message


def test_a_repeated_id_is_no_fault_and_its_place_is_named(folder):
    again = {"id": "good", "image": "gone.png", "conversations": GOOD["conversations"]}
    found = only(check(folder, GOOD, again, LAST))
    assert found.id == "good, number 2" and found.path == "gone.png"
    assert not check(folder, GOOD, GOOD, LAST).problems


def test_an_answer_that_the_tokenizer_cannot_say_is_named(folder):
    unsayable = [TEXT[0], {"from": "gpt", "value": "日本"}]
    found = only(check(folder, GOOD, {"id": "bad", "conversations": unsayable}, LAST))
    assert found.id == "bad" and "no supervised token" in found.message


# ---- files


def with_file(folder: Path, content: bytes, name: str, full: bool) -> Report:
    (folder / "images" / name).write_bytes(content)
    return check(folder, GOOD, {"id": "bad", "image": f"images/{name}", "conversations": SPOKEN}, LAST, full=full)


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize(
    ("content", "name", "message"),
    [
        (b"", "x.png", "corrupt"),
        (b"GIF89a" + bytes(50), "x.gif", "corrupt, or neither"),
        (JPEG, "x.png", "holds a JPEG"),
        (PNG, "x.jpg", "holds a PNG"),
        (PNG, "x.txt", "holds a PNG"),
        (JPEG[:20], "x.jpg", "corrupt"),
        (png_of_size(60_000, 60_000), "x.png", "pixels"),
        (png_of_size(12_000, 12_000), "x.png", "pixels"),  # where Pillow only warns
        (png_of_size(0, 10), "x.png", "corrupt"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "x.eps", "corrupt"),
    ],
)
def test_each_bad_file_gives_one_line(folder, content, name, message, full):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # whatever the caller does with warnings
        found = only(with_file(folder, content, name, full))
    assert (found.id, found.path) == ("bad", f"images/{name}") and message in found.message


@pytest.mark.parametrize(("content", "name"), [(JPEG[:-90], "x.jpg"), (PNG[: len(PNG) // 2], "x.png")])
def test_damage_behind_the_header_is_found_by_decoding_only(folder, content, name):
    found = only(with_file(folder, content, name, full=True))
    assert (found.id, found.path) == ("bad", f"images/{name}") and "corrupt" in found.message
    assert with_file(folder, content, name, full=False).problems == []


def test_each_sample_of_a_shared_bad_picture_is_named(folder):
    (folder / "images" / "x.png").write_bytes(b"no")
    bad = {"image": "images/x.png", "conversations": SPOKEN}
    report = check(folder, GOOD, {"id": "one", **bad}, {"id": "two", **bad})
    assert [problem.id for problem in report.problems] == ["one", "two"]
    assert report.images == 2


@given(st.sampled_from(["x.png", "x.jpg"]), st.data())
def test_damaged_bytes_are_named_or_decode_to_a_picture(tmp_path_factory, name, data):
    """The fuzzer: cut, overwrite, delete and repeat anywhere. Checking and loading agree on what is usable."""
    folder = tmp_path_factory.mktemp("fuzz")
    (folder / "images").mkdir()
    (folder / "images" / "good.png").write_bytes(PNG)
    content = bytearray(PNG if name.endswith("png") else JPEG)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, max(0, len(content) - 1)))
        length = data.draw(st.integers(1, 40))
        patch = data.draw(st.sampled_from([b"", b"\xff" * length, bytes(length), bytes(content[:length]) * 2]))
        content[at : at + length] = patch
    if data.draw(st.booleans()):
        del content[data.draw(st.integers(0, len(content))) :]
    report = with_file(folder, bytes(content), name, full=True)
    if report.problems:
        found = only(report)
        assert (found.id, found.path) == ("bad", f"images/{name}")
        with pytest.raises(ValueError, match=name):
            load_pixels([folder / "images" / name], 8)
    else:
        assert load_pixels([folder / "images" / name], 8).shape == (1, 3, 8, 8)


# ---- nothing outside the folder, and nothing that waits


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize(
    ("link", "target", "image"),
    [
        ("images/link.png", "../../secret.png", "images/link.png"),
        ("images/absolute.png", "{outside}/secret.png", "images/absolute.png"),
        ("away", "../outside", "away/secret.png"),
        ("images/hop.png", "away.png", "images/hop.png"),
        ("images/missing.png", "../../no-such.png", "images/missing.png"),
    ],
)
def test_links_out_of_the_folder_are_named_and_not_followed(folder, monkeypatch, link, target, image, full):
    (folder / link).symlink_to(target.format(outside=folder.parent / "outside"))
    (folder / "images" / "away.png").symlink_to("../../secret.png")
    opened = []
    real_open = Image.open
    monkeypatch.setattr(
        Image, "open", lambda file, *a, **k: opened.append(Path(file).resolve()) or real_open(file, *a, **k)
    )
    found = only(check(folder, GOOD, {"id": "bad", "image": image, "conversations": SPOKEN}, LAST, full=full))
    assert (found.id, found.path) == ("bad", image) and "leaves the data folder" in found.message
    assert opened == [folder / "images" / "good.png"]


def test_links_within_the_folder_are_followed(folder):
    (folder / "images" / "link.png").symlink_to("good.png")
    (folder / "more").symlink_to("images")
    linked = [
        {"id": f"link-{i}", "image": image, "conversations": SPOKEN}
        for i, image in enumerate(["images/link.png", "more/good.png", "more/link.png"])
    ]
    assert check(folder, GOOD, *linked).problems == []


def test_a_data_folder_reached_by_a_link_is_a_data_folder(folder):
    (folder.parent / "linked").symlink_to(folder)
    check(folder, GOOD, LAST)
    assert check_data(folder.parent / "linked", 4, TOKENIZER).problems == []


@pytest.mark.parametrize(
    "make", [os.mkfifo, lambda path: path.symlink_to(path.name), lambda path: path.symlink_to("/dev/zero")]
)
def test_what_would_wait_for_ever_is_named(folder, make):
    make(folder / "images" / "x.png")
    signal.alarm(20)  # kills the test run rather than hang it
    try:
        found = only(check(folder, GOOD, {"id": "bad", "image": "images/x.png", "conversations": SPOKEN}, LAST))
    finally:
        signal.alarm(0)
    assert (found.id, found.path) == ("bad", "images/x.png")


# ---- the JSON file


@pytest.mark.parametrize("byte", [b"\xff", b"\xc3", b"\xed\xa0\x80"])
def test_bytes_that_are_not_utf8_name_the_sample_they_are_in(folder, byte):
    text = json.dumps([GOOD, {"id": "bad", "conversations": [TEXT[0], {"from": "gpt", "value": "HERE"}]}, LAST])
    (folder / "data.json").write_bytes(text.encode().replace(b"HERE", b"caf" + byte))
    report = check_data(folder, 4, TOKENIZER)
    found = only(report)
    assert (found.id, found.path) == ("bad", "data.json") and "UTF-8" in found.message
    assert report.samples == 3


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-32", "latin-1"])
def test_a_file_in_another_encoding_is_read_or_named(folder, encoding):
    text = json.dumps([LAST | {"id": "é"}], ensure_ascii=False)
    (folder / "data.json").write_bytes(text.encode(encoding))
    report = check_data(folder, 4, TOKENIZER)
    assert len(report.problems) == (0 if encoding == "utf-8-sig" else 1)
    assert all(problem.path == "data.json" for problem in report.problems)


@pytest.mark.parametrize("content", [b"", b" \n ", b"[]", b"[{", b"\0" * 100, b"{}", b"7", b"[[[" * 9999])
def test_a_file_without_a_sample_gives_one_line(folder, content):
    (folder / "data.json").write_bytes(content)
    (problem,) = check_data(folder, 4, TOKENIZER).problems
    assert problem.path == "data.json"


@given(st.data())
def test_any_damage_to_the_json_is_survived(tmp_path_factory, data):
    """Up to three damaged places in three samples: never more lines than samples and one, each printable."""
    folder = tmp_path_factory.mktemp("json")
    lines = data.draw(st.booleans())
    good = [{"id": f"s{i}", "conversations": TEXT} for i in range(3)]
    content = bytearray(("\n".join(map(json.dumps, good)) if lines else json.dumps(good)).encode())
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(content)))
        content[at : at + data.draw(st.integers(0, 9))] = data.draw(st.binary(max_size=6))
    (folder / f"data.json{'l' * lines}").write_bytes(content)
    *problems, count = check_data(folder, 4, TOKENIZER).lines()
    assert len(problems) <= 3 + 3  # a line break more may make a line more
    assert all(line.isprintable() for line in problems) and f"{len(problems)} problem(s)" in count


def test_every_json_file_of_a_folder_is_checked_and_a_missing_folder_is_said(folder):
    (folder / "more.jsonl").write_text(json.dumps(GOOD) + "\n" + json.dumps({"id": "bad"}) + "\n")
    report = check(folder, GOOD, LAST)
    assert report.samples == 4 and report.images == 1
    assert only(report)[:2] == ("bad", "more.jsonl")
    assert check_data(folder / "data.json", 4, TOKENIZER).problems == []

    (problem,) = check_data(folder / "nowhere", 4, TOKENIZER).problems
    assert "nowhere" in problem.path and "no .json" in problem.message


def test_a_json_file_that_is_a_link_out_of_the_folder_is_not_read(folder):
    (folder.parent / "outside" / "data.json").write_text(json.dumps([LAST]))
    (folder / "data.json").symlink_to("../outside/data.json")
    report = check_data(folder, 4, TOKENIZER)
    assert report.samples == 0 and len(report.problems) == 1


def test_a_disk_that_fails_is_said_and_the_next_file_is_read(folder, monkeypatch):
    def failing(file, *arguments, **options):
        if str(file).endswith("bad.json"):
            raise OSError(5, "Input/output error")
        return open(file, *arguments, **options)

    monkeypatch.setattr("minillava.json_stream.open", failing, raising=False)
    (folder / "bad.json").write_text("[]")
    report = check(folder, GOOD, LAST)
    assert report.samples == 2
    assert [str(problem) for problem in report.problems] == ["bad.json: can't be read: Input/output error"]
