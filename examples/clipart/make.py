"""Make this folder's pictures and conversations from Debian's openclipart packages.

    apt-get download openclipart-png openclipart-svg
    for package in openclipart-*.deb; do dpkg -x $package unpacked; done
    python examples/clipart/make.py unpacked

Reads selection.tsv (picture, caption), writes images/*.png, train.json and heldout.json. Nothing is random: the same
packages and the same Pillow give the same bytes.
"""

import argparse
import hashlib
import json
from collections import Counter
from pathlib import Path

from PIL import Image, ImageChops

HERE = Path(__file__).parent
SIZE, MARGIN, COLOURS = 64, 2, 64
HELD_OUT = 50
QUESTIONS = (
    "<image>\nwhat is this ?",
    "<image>\nwhat do you see ?",
    "what is this ?\n<image>",
    "what do you see ?\n<image>",
)


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the clip art set from the unpacked Debian packages.")
    parser.add_argument("unpacked", type=Path, help="folder that holds usr/share/openclipart/png and .../svg")
    clipart = parser.parse_args().unpacked / "usr/share/openclipart"
    if not (clipart / "png").is_dir() or not (clipart / "svg").is_dir():
        parser.error(f"{clipart} must hold the folders png and svg: unpack both packages there, as the docstring shows")
    selection = [line.split("\t") for line in (HERE / "selection.tsv").read_text().splitlines()]
    (HERE / "images").mkdir(exist_ok=True)
    for name, caption in selection:
        check_public_domain(clipart / "svg" / Path(name).with_suffix(".svg"))
        small = shrink(Image.open(clipart / "png" / name))
        small.save(HERE / "images" / f"{slug(caption)}.png", optimize=True)
    captions = [caption for _, caption in selection]
    held_out = choose_held_out(captions)
    write("train", [caption for caption in captions if caption not in held_out])
    write("heldout", [caption for caption in captions if caption in held_out])


def check_public_domain(svg: Path) -> None:
    """Each drawing carries its own licence; a few in the package are under another one."""
    text = svg.read_text(errors="replace")
    if "web.resource.org/cc/PublicDomain" not in text and "licenses/publicdomain" not in text:
        raise SystemExit(
            f"{svg}: its metadata does not say that it is in the public domain; take it out of selection.tsv"
        )


def shrink(picture: Image.Image) -> Image.Image:
    """The drawing alone, on white, centred in a small square of few colours."""
    picture = picture.convert("RGBA")
    flat = Image.new("RGBA", picture.size, "white")
    flat.alpha_composite(picture)
    picture = flat.convert("RGB")
    ink = ImageChops.difference(picture, Image.new("RGB", picture.size, "white")).point(lambda v: 255 * (v > 8))
    picture = picture.crop(ink.getbbox())
    scale = (SIZE - 2 * MARGIN) / max(picture.size)
    width, height = (max(1, round(side * scale)) for side in picture.size)
    square = Image.new("RGB", (SIZE, SIZE), "white")
    scaled = picture.resize((width, height), Image.Resampling.LANCZOS)
    square.paste(scaled, ((SIZE - width) // 2, (SIZE - height) // 2))
    return square.quantize(COLOURS, Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE)


def choose_held_out(captions: list[str]) -> set[str]:
    """Captions, in an arbitrary fixed order, whose every word is still said by a caption that is trained on."""
    left = Counter(word for caption in captions for word in set(caption.split()))
    held_out: set[str] = set()
    for caption in sorted(captions, key=lambda caption: hashlib.sha256(caption.encode()).digest()):
        words = set(caption.split())
        if len(held_out) < HELD_OUT and all(left[word] > 1 for word in words):
            held_out.add(caption)
            left.subtract(words)
    return held_out


def write(name: str, captions: list[str]) -> None:
    conversations = [
        {
            "id": slug(caption),
            "image": f"images/{slug(caption)}.png",
            "conversations": [
                {"from": "human", "value": QUESTIONS[i % len(QUESTIONS)]},
                {"from": "gpt", "value": caption},
            ],
        }
        for i, caption in enumerate(captions)
    ]
    (HERE / f"{name}.json").write_text(json.dumps(conversations, indent=1) + "\n")


def slug(caption: str) -> str:
    return caption.replace(" ", "-")


if __name__ == "__main__":
    main()
