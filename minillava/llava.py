"""MiniLLaVA: a vision tower, a projector, one *arm* of the experiment, and a language model.

    pixels -> vision tower -> projector -> arm -> [scattered into the text's embeddings] -> language model

The arm is the only thing that differs between the models we compare; it decides how loud visual tokens are when they
enter the residual stream.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minillava.lm import LM, KVCache, LMConfig
from minillava.norm_align import NormAlign, text_norm
from minillava.vit import ViT, ViTConfig

SHARPNESS = 4.0  # standard deviation of the visual vocabulary's scores at the start
ARMS = ("base", "default", "aligned", "gwc", "scale", "discrete")


@dataclass
class LLaVAConfig:
    """The two towers, the arm between them, and the id of the token that images replace."""

    vision: ViTConfig = field(default_factory=ViTConfig)
    lm: LMConfig = field(default_factory=LMConfig)
    arm: str = "aligned"
    image_token_id: int = 3
    visual_words: int = 64

    @classmethod
    def from_dict(cls, values: dict) -> LLaVAConfig:
        values = dict(values)
        return cls(vision=ViTConfig(**values.pop("vision")), lm=LMConfig(**values.pop("lm")), **values)

    def to_dict(self) -> dict:
        return asdict(self)


class Projector(nn.Module):
    """LLaVA's two-layer GELU MLP from the vision tower's width to the language model's."""

    def __init__(self, vision_width: int, width: int):
        super().__init__()
        self.fc1 = nn.Linear(vision_width, width)
        self.fc2 = nn.Linear(width, width)

    def forward(self, features: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(features)))  # (I, N, Dv) -> (I, N, D)


class Scale(nn.Module):
    """Control: one constant, set once on a calibration batch so that the mean norm becomes T. No LayerNorm."""

    factor: Tensor

    def __init__(self):
        super().__init__()
        self.register_buffer("factor", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


class VisualVocabulary(nn.Module):
    """Control: discrete visual tokens, after Ovis. Each token becomes a softmax over visual words, read like attention.

    In the experiment its tokens start as loud as those of the `base` arm are after stage 1 (`MiniLLaVA.calibrate`), so
    that the arm asks about discreteness and not about size (PAPER.md, RQ4).
    """

    def __init__(self, words: int, width: int):
        super().__init__()
        self.keys = nn.Parameter(torch.randn(words, width))
        self.words = nn.Parameter(torch.randn(words, width))

    def scores(self, x: Tensor) -> Tensor:
        return x @ self.keys.T * x.shape[-1] ** -0.5  # (I, N, D) -> (I, N, K)

    def forward(self, x: Tensor) -> Tensor:
        return self.scores(x).softmax(dim=-1) @ self.words  # (I, N, K) @ (K, D)


def build_arm(config: LLaVAConfig, embeddings: Tensor) -> nn.Module:
    """What stands between the projector and the language model, by name."""
    if config.arm == "base":
        return nn.Identity()
    if config.arm == "default":
        return NormAlign(config.lm.width)
    if config.arm in ("aligned", "gwc"):
        return NormAlign.to_text(embeddings, compensate=config.arm == "gwc")
    if config.arm == "scale":
        return Scale()
    if config.arm == "discrete":
        return VisualVocabulary(config.visual_words, config.lm.width)
    raise ValueError(f"unknown arm '{config.arm}': choose one of {', '.join(ARMS)}")


class MiniLLaVA(nn.Module):
    """A small LLaVA.

    `input_ids` (B, T) hold `image_token_id` at every place that a visual token fills: N consecutive ones per image.
    Images come either as pixels (I, 3, S, S) or as features (I, N, Dv) of the frozen tower (perhaps pooled to a smaller
    N), in the order in which their placeholders appear, row by row. Returns logits (B, T, V), and with
    `return_states=True` also the states of the LM (see `lm.LM`).

    Pass trained towers to build on them; the arm's gain is then read off the LM's embedding table. Raises ValueError if
    a tower is not the one that `config` describes.
    """

    def __init__(self, config: LLaVAConfig, vision: ViT | None = None, lm: LM | None = None):
        super().__init__()
        self.config = config
        self.vision = vision if vision is not None else ViT(config.vision)
        self.lm = lm if lm is not None else LM(config.lm)
        if self.vision.config != config.vision or self.lm.config != config.lm:
            raise ValueError(f"the towers are {self.vision.config} and {self.lm.config}, but the config says {config}")
        self.projector = Projector(config.vision.width, config.lm.width)
        self.arm = build_arm(config, self.lm.embed_tokens.weight)

    def visual_tokens(self, pixel_values: Tensor | None = None, features: Tensor | None = None) -> Tensor:
        """Pixels (I, 3, S, S) or features (I, N, Dv) to tokens (I, N, D) as the LM receives them."""
        if features is None:
            features = self.vision(pixel_values)
        return self.arm(self.projector(features))

    @torch.no_grad()
    def calibrate(self, features: Tensor, visual_norm: float | None = None) -> None:
        """Set what the control arms take from data, once, before training: features (I, N, Dv) of a typical batch.

        `scale` gets its constant. `discrete` gets tokens of mean norm `visual_norm` (by default what the projector
        gives now), and scores sharp enough for its softmax to choose words rather than to average all of them.
        """
        projected = self.projector(features)  # (I, N, D)
        norm = projected.norm(dim=-1).mean()
        if isinstance(self.arm, Scale):
            self.arm.factor.copy_(text_norm(self.lm.embed_tokens.weight) / norm)
        if isinstance(self.arm, VisualVocabulary):
            self.arm.keys.mul_(SHARPNESS / self.arm.scores(projected).std())
            wanted = norm if visual_norm is None else visual_norm
            self.arm.words.mul_(wanted / self.arm(projected).norm(dim=-1).mean())

    def embed(
        self,
        input_ids: Tensor,
        pixel_values: Tensor | None = None,
        features: Tensor | None = None,
        sample_ids: list[str] | None = None,
    ) -> Tensor:
        """Text embeddings with the visual tokens scattered over their placeholders (B, T, D).

        Raises ValueError when placeholders and visual tokens differ in number; it names the first row that cannot be
        served (by its sample id, if given).
        """
        inputs_embeds = self.lm.embed_tokens(input_ids)
        placeholders = input_ids == self.config.image_token_id  # (B, T)
        if pixel_values is None and features is None:
            self._check_counts(placeholders, 0, self.config.vision.num_patches, sample_ids)
            return inputs_embeds
        visual = self.visual_tokens(pixel_values, features)  # (I, N, D)
        self._check_counts(placeholders, visual.shape[0], visual.shape[1], sample_ids)
        return inputs_embeds.masked_scatter(placeholders[..., None], visual.to(inputs_embeds.dtype))

    @staticmethod
    def _check_counts(placeholders: Tensor, images: int, N: int, sample_ids: list[str] | None) -> None:
        if int(placeholders.sum()) == images * N and not bool((placeholders.sum(1) % N).any()):
            return
        counts = placeholders.sum(1).tolist()
        seen = list(accumulate(counts))
        broken = [row for row, count in enumerate(counts) if count % N or seen[row] > images * N]
        odd = broken[0] if broken else len(counts) - 1  # every row is served, and images are left after the last
        name = f"sample '{sample_ids[odd]}'" if sample_ids else f"row {odd}"
        raise ValueError(
            f"{name}: {counts[odd]} image tokens; the batch has {sum(counts)} image tokens "
            f"for {images} image(s) of {N} visual tokens ({images * N})"
        )

    def forward(
        self,
        input_ids: Tensor,
        document_ids: Tensor | None = None,
        pixel_values: Tensor | None = None,
        features: Tensor | None = None,
        sample_ids: list[str] | None = None,
        return_states: bool = False,
    ):
        inputs_embeds = self.embed(input_ids, pixel_values, features, sample_ids)
        return self.lm(inputs_embeds, document_ids, return_states=return_states)

    def set_trainable(self, stage: int, train_vision: bool = False, train_gain: bool = True) -> str:
        """The whole freeze policy. Stage 1 trains projector and arm; stage 2 also the LM, and the tower if asked.

        Returns one line that says what trains and how many parameters that is.
        """
        if stage not in (1, 2):
            raise ValueError(f"stage must be 1 or 2, got {stage}")
        trains = {"vision": train_vision and stage == 2, "projector": True, "arm": train_gain, "lm": stage == 2}
        for name, flag in trains.items():
            getattr(self, name).requires_grad_(flag)
        counts = {
            name: sum(p.numel() for p in getattr(self, name).parameters()) for name, flag in trains.items() if flag
        }
        return f"stage {stage} trains " + ", ".join(f"{name} ({count:,})" for name, count in counts.items() if count)

    @torch.inference_mode()
    def generate(
        self,
        input_ids: Tensor,
        end_token_id: int,
        document_ids: Tensor | None = None,
        pixel_values: Tensor | None = None,
        features: Tensor | None = None,
        max_new_tokens: int = 64,
        temperature: float = 0.0,
        top_p: float = 1.0,
        generator: torch.Generator | None = None,
    ) -> list[list[int]]:
        """Continue each row until `end_token_id`; returns the new ids of each row, the end token left out.

        Rows of different length are padded on the *left*, with `document_ids` 0 on the padding: a batch then gives what
        its rows give alone. `temperature=0` is greedy. Image tokens are never sampled.

        Raises ValueError for rows that end in padding, and as `embed` does.
        """
        B, T = input_ids.shape
        if document_ids is not None and not bool(document_ids[:, -1].all()):
            raise ValueError("a row ends in padding (document id 0), so it can't be continued: pad on the left")
        inputs_embeds = self.embed(input_ids, pixel_values, features)
        cache = KVCache(self.lm.config, B, T + max_new_tokens, inputs_embeds.device, inputs_embeds.dtype)
        done = torch.zeros(B, dtype=torch.bool, device=input_ids.device)
        new_tokens = []
        for _ in range(max_new_tokens):
            logits = self.lm(inputs_embeds, document_ids, cache)[:, -1].float()  # (B, V)
            logits[:, self.config.image_token_id] = -torch.inf
            token = pick(logits, temperature, top_p, generator).masked_fill(done, end_token_id)  # (B,)
            new_tokens.append(token)
            done |= token == end_token_id
            if bool(done.all()):
                break
            if document_ids is not None:
                document_ids = torch.cat([document_ids, document_ids[:, -1:]], dim=1)
            inputs_embeds = self.lm.embed_tokens(token[:, None])  # (B, 1, D)
        rows = torch.stack(new_tokens, dim=1).tolist() if new_tokens else [[] for _ in range(B)]
        return [row[: row.index(end_token_id)] if end_token_id in row else row for row in rows]


def pick(logits: Tensor, temperature: float, top_p: float, generator: torch.Generator | None = None) -> Tensor:
    """Choose one id per row of logits (B, V): the best at temperature 0, else a draw from the top-p nucleus."""
    if not 0 <= temperature < float("inf") or not 0 < top_p <= 1:
        raise ValueError(f"temperature must be >= 0 and top_p in (0, 1], got {temperature} and {top_p}")
    if temperature == 0:
        return logits.argmax(dim=-1)
    probabilities, order = (logits / temperature).softmax(dim=-1).sort(dim=-1, descending=True)
    before = probabilities.cumsum(dim=-1) - probabilities  # mass of the better ones: the best is always kept
    probabilities = probabilities.masked_fill(before >= top_p, 0)
    choice = torch.multinomial(probabilities, 1, generator=generator)  # renormalises
    return order.gather(-1, choice)[:, 0]
