# %% [markdown]
# # 4. A vision tower and a language model from scratch
#
# **Question: where do the two norms come from, before anybody joins the two models?**
#
# Tutorials 0 to 3 took norms as given. Here you build both towers, train each for a moment on a world of coloured
# shapes, and watch their tokens grow. Nothing in the training asks for large or for small tokens.

# %%
import numpy as np
import torch
import torch.nn.functional as F
from exercises import check
from reader import Picture

from minillava import scenes
from minillava.data import Pool, normalize
from minillava.evaluate import cell_accuracy
from minillava.lm import LM, LMConfig, build_mask, build_positions
from minillava.objectives import CellPool, CellReader, cell_loss, next_token_loss
from minillava.style import MODALITY_COLOURS, canvas, in_style
from minillava.tokenizer import Tokenizer
from minillava.train import TrainConfig, fit
from minillava.vit import ViT, ViTConfig
from minillava.world import WorldConfig, build_split, language_samples

torch.manual_seed(0)
torch.set_num_threads(1)  # the models are small: more threads would wait for each other
world = WorldConfig(train_scenes=3000, eval_scenes=200)
train, test = build_split(world, "train", 0), build_split(world, "test", 0)
print(scenes.describe(test.cells[0]))
print(*scenes.ask(test.cells[0], "colour_at", np.random.default_rng(0)))

# %% [markdown]
# The world is a grid of two by two cells. Each may hold one of four shapes in one of six colours. The picture, the
# description and the questions are all made from the same four integers, so they cannot disagree.
#
# **Predict.** What do the first four pictures of the test split look like? The sentence above describes the first.

# %%
with in_style():
    figure, panels = canvas(1, 4, 8.0, 2.1)
    for panel, picture in zip(panels, test.pixels, strict=False):
        panel.imshow(picture.transpose(1, 2, 0))
        panel.set_axis_off()
Picture(figure, "Four small pictures of coloured shapes on noisy grey.")

# %% [markdown]
# **What to see.** 32 by 32 pixels, noise, shapes that are never quite the same size nor quite in the middle.
#
# ## The vision tower
#
# A vision transformer begins by cutting the picture into patches. Each patch is a vector of raw pixels, and one
# linear map turns it into a token. That is all the "convolution" at the bottom of a ViT does.


# %%
def cut(pixels, P):
    """Pictures (B, 3, S, S) to patches (B, N, 3·P·P): channel first inside a patch, patches row by row."""
    B, _, S, _ = pixels.shape
    grid = pixels.reshape(B, 3, S // P, P, S // P, P)
    return grid.permute(0, 2, 4, 1, 3, 5).reshape(B, (S // P) ** 2, -1)


def block(x, layer):
    """One Pre-Norm block by hand: twice, normalise, compute, add."""
    B, N, D = x.shape
    qkv = layer.attn.qkv(layer.norm1(x)).reshape(B, N, 3, layer.attn.heads, -1).permute(2, 0, 3, 1, 4)
    q, k, v = qkv  # each (B, nh, N, hs)
    weights = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).softmax(dim=-1)
    x = x + layer.attn.proj((weights @ v).transpose(1, 2).reshape(B, N, D))
    return x + layer.mlp.fc2(F.gelu(layer.mlp.fc1(layer.norm2(x))))


tower = ViT(ViTConfig(width=64, depth=6, heads=4))
images = normalize(torch.from_numpy(test.pixels[:100]))
with torch.no_grad():
    kernel = tower.patch_embed.proj
    x = cut(images, 8) @ kernel.weight.flatten(1).T + kernel.bias + tower.pos_embed  # (B, N, D)
    for layer in tower.blocks[:-1]:
        x = block(x, layer)
    torch.testing.assert_close(x, tower(images), rtol=1e-4, atol=1e-5)

# %% [markdown]
# Those lines compute what the package computes. Notice where they stop: one block before the end, and without the
# final norm. LLaVA takes its visual features there. Whatever size the residual stream has at that point is the size
# that leaves the tower.
#
# Now train it, with a linear head that must name colour and shape in every cell.
#
# **Predict.** Training makes the tower better at naming. What does it do to the size of its tokens, layer by layer?


# %%
def norms_of(states):
    """Mean norm of the tokens after the embedding and after each block."""
    kept = [value for name, value in states.items() if name == "embedding" or name.endswith(".mlp")]
    return [value.norm(dim=-1).mean().item() for value in kept]


with torch.no_grad():
    before = norms_of(tower(images, return_states=True)[1])
reader = CellReader(tower, world.grid)
fit(reader, cell_loss, CellPool(train.pixels, train.cells), TrainConfig(steps=120, batch_size=48, lr=2e-3), show=False)
with torch.no_grad():
    after = norms_of(tower(images, return_states=True)[1])
named = cell_accuracy(reader, test.pixels, test.cells)
print(f"colour named rightly: {named['colour']:.2f}, shape: {named['shape']:.2f}")

with in_style():
    figure, (panel,) = canvas(1, 1, 5.0, 3.0)
    panel.plot(before, color="#555555", linestyle=":", label="at the start")
    panel.plot(after, color=MODALITY_COLOURS["visual"], marker="o", label="trained")
    panel.set(xlabel="block", ylabel="norm of a patch token", title="vision tower")
    panel.legend()
Picture(figure, "The tokens of the trained tower are several times as long, and grow with depth.")

# %% [markdown]
# **What to see.** Each block adds, and no norm stands on the way: tokens grow with depth. Training lengthens the
# updates, so the trained tower's tokens leave it several times as long as those of the untrained one. The loss never
# mentioned a norm. (Growth is no law: an update that points backwards shortens a token, claim D1.)

# %%
assert named["colour"] > 0.9
assert after[-2] > 2 * before[-2] and after[-2] > after[0]

# %% [markdown]
# ## The language model
#
# The decoder is shaped like Llama. Its attention looks back only, and instead of position vectors it *turns* queries
# and keys by an angle that grows with the position, so that their product depends on the distance.

# %%
tokenizer = Tokenizer.train(scenes.vocabulary())
lm = LM(LMConfig(len(tokenizer), width=64, depth=4, heads=4, kv_heads=4, hidden=128))
pool = Pool(language_samples(world, 4000, 0), tokenizer, 16)
batch = pool.take(range(200))


def rms(x, norm):
    return x / (x.square().mean(dim=-1, keepdim=True) + norm.eps).sqrt() * norm.weight


def turned(x, positions):
    """Queries or keys (B, nh, T, hs): channels i and i + hs/2 are a complex number, which a position turns."""
    half = x.shape[-1] // 2
    speeds = 10_000.0 ** (-torch.arange(half) / half)  # radians for each position, from 1 down to nearly 0
    angles = positions[:, None, :, None] * speeds  # (B, 1, T, hs/2)
    spun = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([spun.real, spun.imag], dim=-1)


def decoder_block(x, layer, document_ids):
    """Attention that looks back only, then SwiGLU, where one half decides how much of the other half passes."""
    B, T, D = x.shape
    part, read = layer.self_attn, rms(x, layer.input_layernorm)
    q, k, v = (p(read).view(B, T, part.heads, -1).transpose(1, 2) for p in (part.q_proj, part.k_proj, part.v_proj))
    positions = build_positions(document_ids)
    scores = turned(q, positions) @ turned(k, positions).transpose(-1, -2) / q.shape[-1] ** 0.5
    weights = scores.masked_fill(~build_mask(document_ids), -torch.inf).softmax(dim=-1)  # (B, nh, T, T)
    x = x + part.o_proj((weights @ v).transpose(1, 2).reshape(B, T, D))
    read = rms(x, layer.post_attention_layernorm)
    return x + layer.mlp.down_proj(F.silu(layer.mlp.gate_proj(read)) * layer.mlp.up_proj(read))


with torch.no_grad():
    x = embeds = lm.embed_tokens(batch.input_ids)  # (B, T, D)
    for layer in lm.layers:
        x = decoder_block(x, layer, batch.document_ids)
    logits = rms(x, lm.norm) @ lm.embed_tokens.weight.T  # the table that reads tokens also writes them
    torch.testing.assert_close(logits, lm(embeds, batch.document_ids), rtol=1e-4, atol=1e-5)

# %% [markdown]
# Equal again, from embeddings to logits. Train it on questions about scenes that are told in words. (A few hundred
# steps more and it would answer nearly all of them: `make demo` gives it those.)
#
# **Predict.** The embedding table starts with entries of size 0.02. With 64 of them, how long is a text token at the
# input? And after training?

# %%
with torch.no_grad():
    text_before = norms_of(lm(embeds, batch.document_ids, return_states=True)[1])
rows = fit(lm, next_token_loss, pool, TrainConfig(steps=150, batch_size=32, lr=1e-3, log_every=150), show=False)
with torch.no_grad():
    text_after = norms_of(lm(lm.embed_tokens(batch.input_ids), batch.document_ids, return_states=True)[1])
print(f"loss {rows[0]['loss']:.2f} -> {rows[-1]['loss']:.2f}")

with in_style():
    figure, panels = canvas(1, 2, 8.0, 3.0)
    panels[0].plot(text_before, color="#555555", linestyle=":", label="at the start")
    panels[0].plot(text_after, color=MODALITY_COLOURS["text"], marker="s", label="trained")
    panels[0].set(xlabel="block", ylabel="norm of a text token", title="language model")
    panels[0].legend()
    sizes = {"visual": after[-2], "text": text_after[0]}
    panels[1].bar(list(sizes), list(sizes.values()), color=[MODALITY_COLOURS[name] for name in sizes])
    panels[1].set(title="what leaves one tower,\nwhat enters the other", ylabel="norm")
Picture(figure, "Text tokens start short and grow through the blocks; visual features are many times as long.")

# %% [markdown]
# **What to see.** Inside the language model too, tokens grow with depth. But *at its input* stands the embedding
# table, which is where its tokens are shortest. The vision tower hands over tokens from near its end, where they are
# longest. A norm gap between the two needs no accident: it is where the cut is made. (Between the two will stand a
# projector with weights of its own. What it does to the gap is the next tutorial.)

# %%
assert rows[-1]["loss"] < 0.5 * rows[0]["loss"]
assert 0.1 < text_before[0] < 0.3  # 0.02 · √64 is 0.16
assert text_after[-1] > 3 * text_after[0]
assert sizes["visual"] > 10 * sizes["text"]

# %% [markdown]
# ## Exercises
#
# **4.1** Write `uncut(patches, P)`, the inverse of `cut`: patches (B, N, 3·P·P) back to pictures (B, 3, S, S).


# %%
def uncut(patches, P):
    """Patches (B, N, 3·P·P) to pictures (B, 3, S, S)."""
    return ...


check("4.1", uncut)

# %% [markdown]
# **4.2** A residual stream of width 64 starts as a token of norm 0.16, and each of 8 branches adds an update of norm
# 1 at a right angle to what is there. What is its norm at the end?

# %%
check("4.2", ...)
