"""The paper's fix for a Hugging Face vision-language model of your own, in place and undone with one call.

    model = LlavaForConditionalGeneration.from_pretrained(...)
    minillava.align(model)                       # before training the projector
    ...                                          # train as you would
    model.save_pretrained(folder)                # the gain is saved with the weights
    model = minillava.load_aligned(folder)

It is meant *before* training. A model that is already trained has learnt to read visual tokens at the norm that they
have: scaling them down at inference changes what it says (others measured a KL of 6 to 20 nat in the next-token
distribution, and values that change more than keys; `minillava probe --interventions` measures it on your model).
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from minillava.hf import Parts, find_parts, observe, text_scale
from minillava.norm_align import NormAlign

CHILD = "norm_align"  # the projector's submodule, hence the prefix of its weights
NEAR = 1.5  # within this factor of the text norm a projector already ends at text scale


def align(model: Any, compensation: bool = True, inputs: dict[str, Tensor] | None = None, **names: Any) -> NormAlign:
    """Put a `NormAlign` behind the model's projector, in place, and return it.

    The gain starts at T/√D (claim N2), T the mean norm of what the embedding *module* gives out, so that a scale inside
    it (Gemma) counts. With `compensation` the gradient into projector and vision tower is divided by the mean gain
    (G1 to G4). The layer becomes the projector's child `norm_align`: optimisers, `state_dict` and `save_pretrained` see
    its weight and bias, and no other name changes. `model.config.minillava_align` says that it is there.
    `names` are those of `minillava.hf.find_parts`, for a family that it does not know.

    Raises ValueError if the model is aligned already or its projector ends at text scale: by its last layer, a norm
    whose gain says so, or, if a processor's `inputs` are given, by measuring.
    """
    parts = find_parts(model, **names)
    if hasattr(parts.projector, CHILD):
        raise ValueError("this model is aligned already; minillava.unalign(model) takes the alignment out")
    T = text_scale(parts.embedding)
    _refuse_text_scale(model, parts, T, inputs)
    weight: Any = parts.embedding.weight
    width = weight.shape[-1]
    norm = NormAlign(width, T / math.sqrt(width), compensation).to(weight.device)
    _insert(model, parts.projector, norm, names)
    return norm


def unalign(model: Any) -> None:
    """Take the alignment out again; the model is as it was, but for what training did. ValueError if there is none."""
    settings = getattr(model.config, "minillava_align", None)
    if settings is None:
        raise ValueError("this model is not aligned")
    projector = find_parts(model, **settings["names"]).projector
    for key, hook in list(projector._forward_hooks.items()):
        if hook is _normalise:
            del projector._forward_hooks[key]
    delattr(projector, CHILD)
    del model.config.minillava_align


def load_aligned(folder: str | Path, **options: Any) -> Any:
    """An aligned model that `save_pretrained` wrote, with its alignment; `options` go to `from_pretrained`.

    transformers alone would load the same folder without the alignment, with a warning that its weights were not used.
    Raises ValueError if the folder holds no aligned model.
    """
    from transformers import AutoModelForImageTextToText

    folder = Path(folder)
    settings = json.loads((folder / "config.json").read_text()).get("minillava_align")
    if settings is None:
        raise ValueError(f"{folder} holds no model that minillava.align has aligned")
    found = _stored(folder)
    model = AutoModelForImageTextToText.from_pretrained(folder, **options)
    parts = find_parts(model, **settings["names"])
    norm = NormAlign(len(found["weight"]), 1.0, settings["compensation"], settings["eps"])
    norm.load_state_dict(found)
    weight: Any = parts.embedding.weight
    _insert(model, parts.projector, norm.to(weight.device), settings["names"])
    return model


def _insert(model: Any, projector: nn.Module, norm: NormAlign, names: dict[str, Any]) -> None:
    projector.add_module(CHILD, norm)
    projector.register_forward_hook(_normalise)
    model.config.minillava_align = {"compensation": norm.compensate, "eps": norm.eps, "names": names}


def _normalise(projector: nn.Module, args: tuple, output: Tensor) -> Tensor:
    """The forward hook: a plain function that finds its norm by name, so that copies of the model keep working."""
    return projector.norm_align(output)  # type: ignore[operator]


def _stored(folder: Path) -> dict[str, Tensor]:
    """Weight and bias of the alignment from a folder's safetensors, whatever prefix transformers gave them."""
    from safetensors import safe_open

    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as opened:
            for key in opened.keys():
                if f".{CHILD}." in key:
                    found[key.rpartition(".")[2]] = opened.get_tensor(key).float()
    if found.keys() != {"weight", "bias"}:
        raise ValueError(f"{folder}: config.json says that the model is aligned, but its weights have no {CHILD}")
    return found


def _refuse_text_scale(model: Any, parts: Parts, T: float, inputs: dict[str, Tensor] | None) -> None:
    reason = "the projector already ends at text scale, so there is nothing to align"
    last = [module for module in parts.projector.modules() if next(module.parameters(recurse=False), None) is not None]
    own = next(parts.projector.parameters(recurse=False), None)  # of a projector that multiplies by itself (Gemma-3)
    if last and own is None and "Norm" in type(last[-1]).__name__:
        norm = last[-1].weight.detach().float().norm().item()  # type: ignore[operator,union-attr]
        if T / NEAR < norm < T * NEAR:
            raise ValueError(
                f"{reason}: its last layer, a {type(last[-1]).__name__}, gives {norm:.3g}, text has {T:.3g}"
            )
    if inputs is not None:
        norm = observe(model, parts, inputs).projected.float().norm(dim=-1).mean().item()
        if T / NEAR < norm < T * NEAR:
            raise ValueError(f"{reason}: visual tokens have a mean norm of {norm:.3g}, the vocabulary {T:.3g}")
