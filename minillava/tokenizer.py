"""Words to ids and back (sentencepiece), and the one `render()` that turns a conversation into ids and labels.

    <user> [<image> × N] what colour is at north ? <assistant> red <end>

Roles, image, padding and end are control symbols: no text that a user types can ever produce them.
"""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import sentencepiece

from minillava import scenes

PAD, UNKNOWN, END, IMAGE, USER, ASSISTANT = range(6)

IGNORE = -100  # label of a token that is not supervised
IMAGE_MARK = "<image>"  # how LLaVA's conversations say where an image goes
CHARACTERS = "abcdefghijklmnopqrstuvwxyz0123456789.,?!:;'\"()-/&+%#"


class Tokenizer:
    """A sentencepiece model, lower-cased, with our six special ids in front."""

    def __init__(self, model: bytes):
        self.model = model
        self.pieces = sentencepiece.SentencePieceProcessor(model_proto=model)
        if (self.pieces.pad_id(), self.pieces.unk_id(), self.pieces.eos_id()) != (PAD, UNKNOWN, END):
            raise ValueError("not one of our sentencepiece models: pad, unk and end must be ids 0, 1, 2")

    @classmethod
    def train(cls, words: Iterable[str]) -> Tokenizer:
        """One piece for each of `words`, and letters, digits and punctuation for everything else. Deterministic."""
        words = sorted(set(words))
        writer = io.BytesIO()
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(["#" + CHARACTERS]),  # letters to fall back on; the words are given below
            model_writer=writer,
            model_type="char",
            vocab_size=len(words) + 128,
            hard_vocab_limit=False,  # as many as there are, not as many as we guessed
            normalization_rule_name="nmt_nfkc_cf",  # NFKC and case folding
            user_defined_symbols=[f"\u2581{word}" for word in words],  # ▁ is sentencepiece's mark of a word's beginning
            pad_id=PAD,
            unk_id=UNKNOWN,
            eos_id=END,
            bos_id=-1,
            pad_piece="<pad>",
            eos_piece="<end>",
            control_symbols=[IMAGE_MARK, "<user>", "<assistant>"],
            num_threads=1,
            minloglevel=2,
        )
        return cls(writer.getvalue())

    @classmethod
    def load(cls, path: Path) -> Tokenizer:
        if not path.is_file():
            raise FileNotFoundError(f"{path}: no tokenizer there; a checkpoint folder holds one as tokenizer.model")
        return cls(path.read_bytes())

    def __len__(self) -> int:
        return self.pieces.get_piece_size()

    def encode(self, text: str) -> list[int]:
        return self.pieces.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        return self.pieces.decode([i for i in ids if i not in (PAD, END, IMAGE, USER, ASSISTANT)])


def world_tokenizer(cache: Path) -> Tokenizer:
    """The tokenizer of the built-in world; trained on first use, then read from `cache`."""
    source = Path(scenes.__file__).read_bytes() + Path(__file__).read_bytes()
    path = cache / f"tokenizer-{hashlib.sha256(source).hexdigest()[:12]}.model"
    if not path.is_file():
        tokenizer = Tokenizer.train(scenes.vocabulary())
        cache.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}")
        partial.write_bytes(tokenizer.model)
        partial.replace(path)
    return Tokenizer.load(path)


def render(
    tokenizer: Tokenizer, turns: Sequence[tuple[str, str | None]], image_tokens: int
) -> tuple[list[int], list[int]]:
    """One conversation as ids and labels of equal length, built together so that they cannot disagree.

    `turns` are (question, answer) pairs; each `<image>` in a question becomes `image_tokens` image ids. Supervised are
    the answers and the end token after each. An answer of None (the last turn's only) leaves the prompt open for
    generation: what is trained on begins with exactly the same ids.
    """
    ids: list[int] = []
    labels: list[int] = []
    for question, answer in turns:
        prompt = [USER]
        for i, text in enumerate(question.split(IMAGE_MARK)):
            prompt += ([IMAGE] * image_tokens if i else []) + tokenizer.encode(text.strip())
        prompt += [ASSISTANT]
        reply = [] if answer is None else [*tokenizer.encode(answer), END]
        ids += prompt + reply
        labels += [IGNORE] * len(prompt) + reply
    return ids, labels
