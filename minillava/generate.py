"""Questions about pictures, answered by a trained model."""

from __future__ import annotations

from pathlib import Path

import torch

from minillava.data import normalize
from minillava.llava import MiniLLaVA
from minillava.llava_json import load_pixels
from minillava.tokenizer import END, IMAGE_MARK, PAD, Tokenizer, render


def answer(
    model: MiniLLaVA,
    tokenizer: Tokenizer,
    prompt: str,
    images: list[Path],
    max_new_tokens: int = 64,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
) -> list[str]:
    """One answer per picture (a batch), or one answer without any. Raises ValueError, naming a picture that is bad.

    The picture goes first, as in training, unless the prompt says otherwise with an `<image>` mark.
    """
    if images and IMAGE_MARK not in prompt:
        prompt = f"{IMAGE_MARK} {prompt}"
    if prompt.count(IMAGE_MARK) > 1 or (IMAGE_MARK in prompt and not images):
        raise ValueError(
            f"the prompt has {prompt.count(IMAGE_MARK)} {IMAGE_MARK} marks, but an answer sees one picture"
        )
    missing = [path for path in images if not path.is_file()]
    if missing:
        raise ValueError(f"{missing[0]}: no such image")
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be at least 1, got {max_new_tokens}")
    device = next(model.parameters()).device
    ids, _ = render(tokenizer, [(prompt, None)], model.config.vision.num_patches)
    input_ids = torch.tensor([ids] * max(1, len(images)), device=device)
    pixels = normalize(load_pixels(images, model.config.vision.image_size).to(device)) if images else None
    generator = torch.Generator(device).manual_seed(seed)
    rows = model.generate(
        input_ids,
        END,
        (input_ids != PAD).long(),
        pixel_values=pixels,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        generator=generator,
    )
    return [tokenizer.decode(row) for row in rows]
