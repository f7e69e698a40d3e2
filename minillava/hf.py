"""Hugging Face vision-language models, seen from inside: one table of where things are, and one observed forward pass.

    model, processor = load("a folder or a name")
    parts = find_parts(model)
    seen = observe(model, parts, make_inputs(processor, image, "What is this?"))
    trace_observations([seen.observation])

The states are the residual stream itself. A layer's input is what its first hook sees; the state between its branches
is the input of the norm before the MLP, so a post-branch norm (Gemma-3) is inside the update, where it belongs; what
is added between layers (Qwen3-VL's deep-stack features) is the step `block{i}.added`; and the last state is taken
before the final norm, which transformers' last hidden state is not. `observe(..., verify=True)` adds the branches up
again and compares.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from minillava.probe import Observation


class Names(NamedTuple):
    """Where a family keeps its parts: dotted paths from the model."""

    embedding: str
    projector: str
    layers: str


_LLAVA = Names("model.language_model.embed_tokens", "model.multi_modal_projector", "model.language_model.layers")
_QWEN = _LLAVA._replace(projector="model.visual.merger")
_IDEFICS = Names("model.text_model.embed_tokens", "model.connector", "model.text_model.layers")
FAMILIES = {  # config.model_type: every family that the tests build and run
    "llava": _LLAVA,
    "llava_next": _LLAVA,
    "paligemma": _LLAVA,
    "gemma3": _LLAVA,
    "internvl": _LLAVA,
    "qwen2_5_vl": _QWEN,
    "qwen3_vl": _QWEN,
    "smolvlm": _IDEFICS,
    "idefics3": _IDEFICS,
}


@dataclass(frozen=True)
class Parts:
    """The four things that the probe needs of a model, and the norm after the last layer (None if there is none)."""

    embedding: nn.Module  # token ids to vectors as the LM receives them: Gemma's scale is inside
    projector: nn.Module
    layers: nn.ModuleList
    image_token_id: int
    final_norm: nn.Module | None


def find_parts(
    model: nn.Module,
    embedding: str | None = None,
    projector: str | None = None,
    layers: str | None = None,
    image_token_id: int | None = None,
) -> Parts:
    """The parts of a model, by its family or by name; a name given here goes before the family's.

    Raises ValueError for a model of no known family unless all four are named, and for a path that leads nowhere.
    """
    config: Any = model.config
    family = FAMILIES.get(config.model_type, Names("", "", ""))
    names = Names(embedding or family.embedding, projector or family.projector, layers or family.layers)
    token: Any = getattr(config, "image_token_id", None) if image_token_id is None else image_token_id
    missing = [f"--{part}" for part, path in names._asdict().items() if not path]
    missing += ["--image-token-id"] if token is None else []
    if missing:
        raise ValueError(
            f"model type '{config.model_type}' is none of {', '.join(FAMILIES)}. Name four things: the text embedding "
            "(--embedding), the projector (--projector), the LM's decoder layers (--layers), each a dotted path, and "
            f"the id of the image token (--image-token-id). Still missing: {', '.join(missing)}"
        )
    modules: dict[str, Any] = {}
    for part, path in names._asdict().items():
        try:
            modules[part] = model.get_submodule(path)
        except AttributeError:
            tops = ", ".join(name for name, _ in model.named_modules() if 0 < name.count(".") + 1 <= 3)
            raise ValueError(f"--{part} {path}: no such module; the model has {tops}") from None
    if not isinstance(modules["layers"], nn.ModuleList):
        raise ValueError(f"--layers {names.layers}: a {type(modules['layers']).__name__}, not the list of layers")
    norm = getattr(model.get_submodule(names.layers.rpartition(".")[0]), "norm", None)
    return Parts(**modules, image_token_id=token, final_norm=norm)


# Loading and asking --------------------------------------------------------------------------------------------------


def load(source: str | Path, revision: str | None = None, dtype: str = "auto", device: str = "cpu") -> tuple[Any, Any]:
    """Model (in eval mode) and processor, from a folder of `save_pretrained` or by name. Raises OSError if neither."""
    try:
        from transformers import AutoModelForImageTextToText, AutoProcessor
    except ImportError as error:
        raise ValueError(f"{error}: Hugging Face models need the extra, pip install 'minillava[pretrained]'") from None

    model: Any = AutoModelForImageTextToText.from_pretrained(source, revision=revision, dtype=dtype)
    return model.to(device).eval(), AutoProcessor.from_pretrained(source, revision=revision)


def make_inputs(processor: Any, image: Any, question: str, device: str = "cpu") -> dict[str, Tensor]:
    """What the model takes for one picture (PIL) and one question, through its own chat template if it has one."""
    if getattr(processor, "chat_template", None):
        content = [{"type": "image"}, {"type": "text", "text": question}]
        prompt = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
    else:
        prompt = f"{getattr(processor, 'image_token', '<image>')} {question}"
    inputs = processor(images=[image], text=[prompt], return_tensors="pt")
    inputs.pop("labels", None)  # PaliGemma's processor makes them; a probe asks and doesn't train
    return dict(inputs.to(device))


def without_image(inputs: dict[str, Tensor], image_token_id: int) -> dict[str, Tensor]:
    """The same prompt with its image tokens cut out and no pixels."""
    ids = inputs["input_ids"]
    keep = ids[0] != image_token_id  # (T,)
    return {name: value[:, keep] for name, value in inputs.items() if value.shape == ids.shape}


def token_masks(inputs: dict[str, Tensor], image_token_id: int) -> tuple[Tensor, Tensor]:
    """Masks (B, T) of visual and of text tokens.

    The sequence's first token is not counted as text: trained LMs park unneeded attention on it, at a norm of up to a
    thousand times the others', and one such token would be the mean.
    """
    ids = inputs["input_ids"]
    visual = ids == image_token_id
    text = ~visual & inputs.get("attention_mask", torch.ones_like(ids)).bool()
    text[:, 0] = False
    return visual, text


def vocabulary_norms(embedding: nn.Module, chunk: int = 8192) -> Tensor:
    """L2 norm (V,) of every word as the embedding module gives it out, in constant extra memory."""
    weight: Any = embedding.weight
    ids = torch.arange(len(weight), device=weight.device)
    with torch.no_grad():
        return torch.cat([embedding(piece).double().norm(dim=-1) for piece in ids.split(chunk)])


def text_scale(embedding: nn.Module) -> float:
    """T: mean norm of the words that are not zero (PAPER.md, D), of the embedding's outputs. ValueError if all are."""
    norms = vocabulary_norms(embedding)
    if not bool((norms > 1e-6).any()):
        raise ValueError("every text embedding is zero, so there is no text scale")
    return norms[norms > 1e-6].mean().item()


# Observing -----------------------------------------------------------------------------------------------------------


@dataclass
class Pass:
    """What one observed forward pass leaves behind."""

    observation: Observation
    encoder: Tensor  # (N, Dv) what the projector receives, one row a patch
    projected: Tensor  # (N', D) what it gives
    next_token: Tensor  # (B, V) logits after the last token


@torch.no_grad()
def observe(
    model: Any, parts: Parts, inputs: dict[str, Tensor], visual_scale: float = 1.0, verify: bool = False
) -> Pass:
    """Run the model once and keep its residual stream; nothing is changed unless visual tokens are scaled.

    `visual_scale` multiplies visual tokens as they enter the LM (not what is added to them later). With `verify`, the
    outputs of all branches are added up and compared with the states. Raises ValueError if there is no visual or no
    text token, or where the sum does not agree: then the model is not made of the blocks that the probe knows.
    """
    visual, text = token_masks(inputs, parts.image_token_id)
    for what, mask in (("visual", visual), ("text", text)):
        if not bool(mask.any()):
            raise ValueError(f"the prompt has no {what} token (image token id {parts.image_token_id})")
    kept: dict[tuple[str, int], Tensor] = {}
    few = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
    with hooked(parts, kept, visual, visual_scale, verify):
        logits = model(**inputs, use_cache=False, **few).logits[:, -1]
    if ("encoder", 0) not in kept:
        raise ValueError("the projector was not called: is it the right module?")
    states = residual_stream(kept, len(parts.layers))
    if verify:
        _verify(kept, len(parts.layers))
    vision: Any = getattr(model.config, "vision_config", None)
    patch = getattr(vision, "hidden_size", 0) or kept["encoder", 0].shape[-1]
    # InternVL's projector receives four patches side by side; others of width Dv are not changed by this.
    encoder = kept["encoder", 0] if kept["encoder", 0].shape[-1] % patch else kept["encoder", 0].reshape(-1, patch)
    never = torch.empty(0)  # queries and keys are recorded on request alone, in `interventions`
    observation = Observation(states, [], [], never, visual, text)
    return Pass(observation, encoder.flatten(0, -2), kept["projected", 0].flatten(0, -2), logits)


def residual_stream(kept: dict[tuple[str, int], Tensor], layers: int) -> dict[str, Tensor]:
    """States in order, named as `Observation` wants them, from what the hooks kept."""
    states = {"embedding": kept["input", 0]}
    for i in range(layers):
        output = kept["output", i]
        if ("middle", i) in kept:
            states[f"block{i}.attn"] = kept["middle", i]
        states[f"block{i}.mlp" if ("middle", i) in kept else f"block{i}.layer"] = output
        after = kept.get(("input", i + 1), output)  # of the next layer, or of the final norm
        if after is not output and not torch.equal(after, output.to(after.device)):
            states[f"block{i}.added"] = after
    return states


def before_mlp(layer: nn.Module) -> nn.Module | None:
    """The norm whose input is the state between a layer's branches; None for a layer that is one step."""
    return getattr(layer, "pre_feedforward_layernorm", None) or getattr(layer, "post_attention_layernorm", None)


def branch_ends(layer: nn.Module) -> tuple[nn.Module | None, nn.Module | None]:
    """The modules whose outputs are added to the stream: the branches, or the norms after them (Gemma-3)."""
    if hasattr(layer, "pre_feedforward_layernorm"):
        return layer.post_attention_layernorm, layer.post_feedforward_layernorm  # type: ignore[return-value]
    return getattr(layer, "self_attn", None), getattr(layer, "mlp", None)


@contextmanager
def hooked(
    parts: Parts, kept: dict[tuple[str, int], Tensor], visual: Tensor, scale: float, verify: bool
) -> Iterator[None]:
    """Hooks for one pass. They keep references, not copies, and are gone afterwards whatever happens."""

    def keep_input(key: str, i: int) -> Callable:
        def hook(module: nn.Module, args: tuple, kwargs: dict) -> None:
            kept[key, i] = args[0] if args else next(iter(kwargs.values()))

        return hook

    def keep_output(key: str, i: int) -> Callable:
        def hook(module: nn.Module, args: tuple, output: Any) -> None:
            kept[key, i] = output[0] if isinstance(output, tuple) else output

        return hook

    def scale_input(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        states = args[0] if args else kwargs["hidden_states"]
        states = torch.where(visual[..., None], states * scale, states)
        return (states, *args[1:]) if args else args, kwargs if args else kwargs | {"hidden_states": states}

    with ExitStack() as stack:

        def before(module: nn.Module | None, hook: Callable) -> None:
            if module is not None:
                stack.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)

        def after(module: nn.Module | None, hook: Callable) -> None:
            if module is not None:
                stack.callback(module.register_forward_hook(hook).remove)

        before(parts.projector, keep_input("encoder", 0))
        after(parts.projector, keep_output("projected", 0))
        if scale != 1:
            before(parts.layers[0], scale_input)  # hooks run in order: the next one sees the scaled states
        for i, layer in enumerate(parts.layers):
            before(layer, keep_input("input", i))
            before(before_mlp(layer), keep_input("middle", i))
            after(layer, keep_output("output", i))
            for name, end in zip(("attention", "mlp"), branch_ends(layer) if verify else (), strict=False):
                after(end, keep_output(name, i))
        before(parts.final_norm, keep_input("input", len(parts.layers)))
        yield


def _verify(kept: dict[tuple[str, int], Tensor], layers: int) -> None:
    """Both branches of every layer must add up to the states that were taken; rounding of the dtype is allowed for."""
    for i in range(layers):
        if ("middle", i) not in kept:
            continue
        for start, branch, end in (("input", "attention", "middle"), ("middle", "mlp", "output")):
            if (branch, i) not in kept:
                continue
            h, after = kept[start, i].float(), kept[end, i].float()
            gap = (h + kept[branch, i].float() - after).norm(dim=-1)
            room = 4 * torch.finfo(kept[end, i].dtype).eps * (h.norm(dim=-1) + after.norm(dim=-1))
            if not bool((gap <= room).all()):
                raise ValueError(
                    f"layer {i + 1}: its {branch} branch does not add up to the state after it, so this is not the "
                    "Pre-Norm block that the probe knows"
                )
