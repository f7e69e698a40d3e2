"""Conversations about real pictures, from a folder in LLaVA's format: JSON beside PNG and JPEG files.

    [{"id": "cat-1", "image": "pictures/cat.png",
      "conversations": [{"from": "human", "value": "<image>\\nwhat is this ?"}, {"from": "gpt", "value": "a cat"}]}]

`image` is one name, a list of names, or absent; each `<image>` mark in a question stands for the next of them. A first
message from `system` goes in front of the first question. The file is a JSON list or JSON lines. What comes out are the
same `Sample`s that the built-in world makes, so that training is the same.

The folder is not trusted: nothing outside it is read, and no file can make the reading hang or fill the memory.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from minillava.data import Sample
from minillava.json_stream import records
from minillava.tokenizer import IMAGE_MARK

NO_JSON = "no .json or .jsonl file there (a link that leaves its folder is not followed)"
FORMATS = {".png": "PNG", ".jpg": "JPEG", ".jpeg": "JPEG"}


class Problem(NamedTuple):
    """What is wrong with a sample, or, without `id`, with a whole file.

    `path` is the file to mend: a picture as the sample names it, or the JSON file.
    """

    id: str
    path: str
    message: str

    def __str__(self) -> str:
        whose = f"sample '{self.id}': " if self.id else ""
        return f"{self.path}: {whose}{self.message}"


def json_files(path: Path | str) -> list[Path]:
    """The JSON files that `path` means: itself, or those in the folder. Links that leave their folder are left out."""
    path = Path(path)
    found = [path] if path.is_file() else sorted([*path.glob("*.json"), *path.glob("*.jsonl")])
    return [file for file in found if file.is_file() and file.resolve().is_relative_to(file.parent.resolve())]


def samples(file: Path) -> Iterator[tuple[Sample, list[Path]] | Problem]:
    """Each conversation of a JSON file with its picture files, which exist; or what is wrong with it.

    The samples' own `images` are still empty.
    """
    root = file.parent.resolve()
    realpath = lru_cache(maxsize=10_000)(os.path.realpath)  # most pictures share their folder
    seen: set[str] = set()
    for number, record in enumerate(records(file), 1):
        path, name = file.name, name_of(record, number)
        try:
            sample, pictures = to_sample(record, name)
            if name in seen:  # mixes of several sets do repeat ids; a message must still name one sample
                sample.id = name = f"{name}, number {number}"
            seen.add(name)
            files = []
            for path in pictures:  # from here on, `path` is the file to blame
                files.append(resolve(root, path, realpath))
        except ValueError as error:
            yield Problem(shown(name), shown(path), str(error))
        else:
            yield sample, files


def name_of(record: object, number: int) -> str:
    """The sample's id, or '#7' for the seventh in its file if it has none."""
    given = record.get("id") if isinstance(record, dict) else None
    return str(given) if isinstance(given, str | int) and not isinstance(given, bool) else f"#{number}"


def to_sample(record: object, name: str) -> tuple[Sample, list[str]]:
    """A parsed conversation as a Sample, and the names of its pictures. Raises ValueError, saying what is wrong."""
    if isinstance(record, ValueError):
        raise record
    if not isinstance(record, dict):
        raise ValueError(f"a sample must be an object, this is {kind(record)}")
    if name.startswith("#") and record.get("id") != name:
        raise ValueError(f"'id' must be a text or a whole number, this is {kind(record.get('id'))}")
    check_text(name, "'id'")
    pictures = record.get("image")
    pictures = [] if pictures is None else pictures if isinstance(pictures, list) else [pictures]
    for picture in pictures:
        if not isinstance(picture, str):
            raise ValueError(f"'image' must be a file name or a list of them, not {kind(picture)}")
    turns = to_turns(record.get("conversations"))
    marks = sum(question.count(IMAGE_MARK) for question, _ in turns)
    if marks != len(pictures):
        raise ValueError(f"{marks} <image> mark(s) in its questions but {len(pictures)} image(s)")
    if not any(answer and answer.strip() for _, answer in turns):
        raise ValueError("no supervised token, because it has no answer")
    return Sample(name, turns, [], ["conversation"] * len(turns)), pictures


def to_turns(messages: object) -> list[tuple[str, str | None]]:
    """Messages as (question, answer) turns; the last answer may be missing. Raises ValueError as `to_sample` does."""
    if not isinstance(messages, list):
        raise ValueError(f"'conversations' must be a list of messages, this is {kind(messages)}")
    turns: list[tuple[str, str | None]] = []
    system, expected = "", "human"
    for i, message in enumerate(messages, 1):
        role, text = (message.get("from"), message.get("value")) if isinstance(message, dict) else (None, None)
        if not isinstance(role, str) or not isinstance(text, str):
            raise ValueError(f"message {i} must be an object with the texts 'from' and 'value'")
        if role not in ("human", "gpt", "system"):
            raise ValueError(f"message {i} has the unknown role '{shown(role)}': use human, gpt or system")
        check_text(text, f"message {i}")
        if role == "system" and i == 1:
            system = text + "\n"
            continue
        if role != expected:
            raise ValueError(f"roles must alternate: message {i} is from {role}, not from {expected}")
        if role == "human":
            turns.append((system + text, None))
            system, expected = "", "gpt"
        else:
            turns[-1] = (turns[-1][0], text)
            expected = "human"
    return turns


def check_text(text: str, what: str) -> None:
    """Raises ValueError if `text` holds half a character: bytes that were not UTF-8, or a lone \\ud800 escape."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{what} is not valid UTF-8: save the file as UTF-8") from None


def kind(value: object) -> str:
    names = {
        dict: "an object",
        list: "a list",
        str: "a text",
        int: "a number",
        float: "a fraction",
        bool: "true or false",
    }
    return names.get(type(value), "missing or null")


def shown(text: str) -> str:
    """`text` on one line of printable characters, shortened."""
    text = text if len(text) <= 200 else text[:199] + "…"
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


# ---- pictures


def resolve(root: Path, name: str, realpath: Callable[[str], str] = os.path.realpath) -> Path:
    """The file in the folder `root` that `name` means. Raises ValueError if there is none, or if it is outside."""
    check_text(name, "the image's name")
    if not name or "\0" in name or os.path.isabs(name) or ".." in name.split("/"):
        raise ValueError("an image's name must be relative to the data folder, without '..'")
    file = root / name
    try:
        folder = realpath(str(file.parent))
        real = realpath(str(file)) if file.is_symlink() else os.path.join(folder, file.name)
        if not Path(real).is_relative_to(root):
            raise ValueError("a link that leaves the data folder")
        if not os.path.isfile(real):  # a pipe would wait for ever
            raise ValueError("not a regular file" if os.path.lexists(real) else "no such image in the data folder")
    except OSError as error:
        raise ValueError(f"can't be opened: {error.strerror}") from None
    return file


def open_picture(file: Path) -> Image.Image:
    """Read a picture's header. Raises ValueError if the file is no PNG or JPEG, named as such, of sensible size."""
    expected = FORMATS.get(file.suffix.lower())
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            picture = Image.open(file, formats=("PNG", "JPEG"))
    except (Image.DecompressionBombWarning, Image.DecompressionBombError):
        raise ValueError(f"more than {Image.MAX_IMAGE_PIXELS:,} pixels: scale it down") from None
    except Exception:  # a damaged header can raise nearly anything
        raise ValueError("corrupt, or neither PNG nor JPEG") from None
    if picture.format != expected:
        picture.close()
        raise ValueError(f"holds a {picture.format}, which its name does not say: rename it")
    return picture


def read_picture(file: Path, image_size: int) -> np.ndarray:
    """A picture as uint8 (3, S, S), turned as its EXIF says, transparency on white, padded with white to a square.

    Like LLaVA we pad and never crop: nothing is lost at the edges. Raises ValueError if it can't be decoded.
    """
    with open_picture(file) as opened:
        try:
            opened.draft("RGB", (2 * image_size, 2 * image_size))  # a large JPEG is decoded at a fraction of its size
            picture = ImageOps.exif_transpose(opened)
            if picture.mode.startswith("I"):  # 16-bit grey, which Pillow would clip instead of scale
                picture = Image.fromarray((np.asarray(picture) >> 8).astype(np.uint8))
            transparent = "A" in picture.getbands() or "transparency" in picture.info
            picture = picture.convert("RGBA" if transparent else "RGB")
        except Exception as error:  # damaged data can raise nearly anything
            raise ValueError(f"corrupt: {shown(str(error))}") from None
    longest = max(picture.size)
    width, height = (max(1, round(side * image_size / longest)) for side in picture.size)
    square = Image.new("RGB", (image_size, image_size), "white")
    scaled = picture.resize((width, height), Image.Resampling.BICUBIC)
    corner = ((image_size - width) // 2, (image_size - height) // 2)
    square.paste(scaled, corner, scaled if transparent else None)
    return np.array(square).transpose(2, 0, 1)


def load_pixels(files: Sequence[Path], image_size: int) -> Tensor:
    """Pictures as one uint8 tensor (M, 3, S, S); see `read_picture`. Raises ValueError, naming the file."""
    pixels = torch.empty(len(files), 3, image_size, image_size, dtype=torch.uint8)
    for i, file in enumerate(files):
        try:
            pixels[i] = torch.from_numpy(read_picture(file, image_size))
        except ValueError as error:
            raise ValueError(f"{file}: {error}; `minillava check-data` lists every bad sample") from None
    return pixels


def read_folder(path: Path | str) -> tuple[list[Sample], list[Path]]:
    """The samples of a folder (or of one JSON file in it), and the distinct pictures that their `images` count.

    Raises ValueError at the first bad sample, naming it.
    """
    files = json_files(path)
    if not files:
        raise ValueError(f"{path}: {NO_JSON}")
    if len(files) > 1:
        raise ValueError(f"{path}: several JSON files, name one of them: {', '.join(file.name for file in files)}")
    read: list[Sample] = []
    places: dict[Path, int] = {}
    for item in samples(files[0]):
        if isinstance(item, Problem):
            raise ValueError(f"{item}; `minillava check-data {path}` lists every bad sample")
        sample, pictures = item
        sample.images = [places.setdefault(picture, len(places)) for picture in pictures]
        read.append(sample)
    return read, list(places)
