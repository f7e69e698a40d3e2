# %% [markdown]
# # 1. Pre-Norm in forty lines
#
# **Question: does a layer push harder on a longer token?**
#
# It would be fair if it did. A token 37 times as long would get a push 37 times as large and turn just as far. In this
# tutorial you build the block that nearly every language model is made of, put one token in at several sizes, and look.

# %%
import torch
import torch.nn.functional as F
from exercises import check
from reader import GREY, Picture, quote

import theory
from minillava.lm import Block, LMConfig, build_mask, build_positions, rotary_table, rotate
from minillava.style import canvas, in_style

torch.manual_seed(0)
torch.set_num_threads(1)
torch.set_default_dtype(torch.float64)  # so that rounding stays out of the way until we ask about it

# %% [markdown]
# ## Forty lines
#
# A block has two *branches*, attention and an MLP. Each branch first normalises what it reads, then computes something,
# and the result is *added* to the token. The token itself is never normalised. That is Pre-Norm.
#
# First the normalisation: divide each token by its root mean square. The small `eps` keeps us from dividing by zero.


# %%
def rms_norm(h, eps):
    return h / torch.sqrt(h.pow(2).mean(-1, keepdim=True) + eps)  # (B, T, D)


# %% [markdown]
# Attention: queries, keys and values from the same token, the queries and keys turned by their position (RoPE), a
# softmax, a mixture of values. Several query heads share a key head, so keys and values are repeated.


# %%
def attention(x, w, rotary, mask):
    B, T, D = x.shape
    hs = D // w.heads
    q = rotate((x @ w.q_proj.weight.T).view(B, T, w.heads, hs).transpose(1, 2), rotary)  # (B, nh, T, hs)
    k = rotate((x @ w.k_proj.weight.T).view(B, T, w.kv_heads, hs).transpose(1, 2), rotary)  # (B, kv, T, hs)
    v = (x @ w.v_proj.weight.T).view(B, T, w.kv_heads, hs).transpose(1, 2)  # (B, kv, T, hs)
    k, v = (part.repeat_interleave(w.heads // w.kv_heads, dim=1) for part in (k, v))  # (B, nh, T, hs)
    scores = (q @ k.transpose(-1, -2) / hs**0.5).masked_fill(~mask, -torch.inf)  # (B, nh, T, T)
    mixed = scores.softmax(-1) @ v  # (B, nh, T, hs)
    return mixed.transpose(1, 2).reshape(B, T, D) @ w.o_proj.weight.T


# %% [markdown]
# The MLP (SwiGLU): one half decides how much of the other half passes.


# %%
def mlp(x, w):
    return (F.silu(x @ w.gate_proj.weight.T) * (x @ w.up_proj.weight.T)) @ w.down_proj.weight.T


# %% [markdown]
# And the block. Two lines, and the two plus signs in them are the subject of this whole project.


# %%
def block(h, w, eps, rotary, mask):
    h = h + attention(rms_norm(h, eps), w.self_attn, rotary, mask)
    return h + mlp(rms_norm(h, eps), w.mlp)


# %% [markdown]
# Is it the real thing? The package has its own block in `minillava/lm.py`, into which the weights of Llama-family
# models fit. Take one with random weights and compare.

# %%
config = LMConfig(width=96, heads=4, kv_heads=2, hidden=256, eps=0.0)
theirs = Block(config, layer=0).requires_grad_(False)
documents = torch.ones(1, 12, dtype=torch.long)  # twelve tokens of one document
mask = build_mask(documents)
rotary = rotary_table(build_positions(documents), config.width // config.heads, config.rope_theta)

h = torch.randn(1, 12, config.width)
difference = (block(h, theirs, 0.0, rotary, mask) - theirs(h, rotary, mask)[0]).abs().max().item()
print(f"largest difference to minillava.lm.Block: {difference:.1e}")
assert difference < 1e-5  # their rotary angles and statistics are in fp32 on purpose

# %% [markdown]
# ## One branch
#
# Now the question. Make every token longer or shorter by a factor of its own, and watch what the attention branch adds.
#
# **Predict.** We multiply the twelve tokens by twelve different powers of two, between 1/64 and 64. By how much does
# the update change?


# %%
def attention_update(h, eps=0.0):
    return attention(rms_norm(h, eps), theirs.self_attn, rotary, mask)


def mlp_update(h, eps=0.0):
    return mlp(rms_norm(h, eps), theirs.mlp)


factors = 2.0 ** torch.randint(-6, 7, (1, 12, 1))
for update in (attention_update, mlp_update):
    change = (update(factors * h) - update(h)).abs().max().item()
    print(f"{update.__name__}: largest change {change}")
    assert change == 0.0

# %% [markdown]
# Zero. Not small: zero, in every bit. Multiplying by a power of two changes the exponent of a floating point number and
# nothing else, so the division takes it out again exactly. For other factors the last digit may differ.
#
# So the answer to this tutorial's question is no. A branch sees the *direction* of a token and never its length. The
# push depends on where the arrow points, and a long arrow gets the same push as a short one. It turns less by as much
# as it is longer. (In the ledger this is claim S1.)
#
# A warning, because this is easy to over-read. "The push ignores the length" does not mean "every token gets the same
# push". Tokens that point elsewhere get other pushes, and text and images do point elsewhere. The paper assumes equal
# pushes (its assumption A1). We will measure instead.
#
# ## One layer is not one branch
#
# **Predict.** A layer has two branches, each of which ignores the scale. Does the layer ignore it too?

# %%
scales = torch.logspace(-2, 2, 41)


def layer_update(h, eps=0.0):
    return block(h, theirs, eps, rotary, mask) - h


def relative_change(update, eps=0.0, base=h):
    reference = update(base, eps)
    return [((update(s * base, eps) - reference).norm() / reference.norm()).item() for s in scales]


changes = {
    "attention branch": relative_change(attention_update),
    "MLP branch": relative_change(mlp_update),
    "whole layer": relative_change(layer_update),
}
with in_style():
    figure, (panel,) = canvas(1, 1, 5.6, 3.2)
    for (name, change), line in zip(changes.items(), ("-", ":", "--"), strict=True):
        panel.plot(scales, change, color=GREY if line != "--" else "#009E73", linestyle=line, label=name)
    panel.set(xscale="log", xlabel="factor on the token", ylabel="change of the update, relative")
    panel.legend()
Picture(figure, "The update of either branch does not change with the token's scale; that of the whole layer does.")

# %% [markdown]
# **What to see.** The two branches lie flat on zero. The whole layer does not. Its second branch reads the token
# *after* the first push, $h + a$, and a long $h$ hides $a$ where a short one is overwhelmed by it. So the second branch
# sees another direction, and answers another thing.

# %%
assert max(changes["attention branch"]) < 1e-14
assert max(changes["MLP branch"]) < 1e-14
assert max(changes["whole layer"]) > 0.03

# %% [markdown]
# This is why our theory counts *branches*, not layers, wherever it says "one step". It is also why you should be
# careful with plots of "cosine between adjacent layers", including ours.
#
# ## What eps changes
#
# In a real model eps is not zero. It is added to the mean square, so it matters for tokens whose numbers are small, and
# text embeddings are small: norm 1.08 spread over 4096 components.
#
# **Predict.** How small is one component, typically? Square that, and compare it with eps = 1e-5. By what percentage
# does eps shrink a normalised text token of LLaVA-1.5? And a visual one, of norm 39.96?

# %%
width, eps = 4096, 1e-5
text_loss = float(theory.shrinkage(1.08 / width**0.5, eps))
visual_loss = float(theory.shrinkage(39.96 / width**0.5, eps))
quote("0.017", 1.08 / width**0.5)
quote("1.7", 100 * text_loss)
quote("0.0013", 100 * visual_loss)

# %% [markdown]
# A component of a text token is about 0.017, its square 0.0003, and eps is a thirtieth of that. So eps takes 1.7
# percent from a text token and 0.0013 percent from a visual token. Not nothing, and not the story either.
#
# **Predict.** The factor is called ρ. For a token of norm $n$ and width $D$ it is $\rho = (1 + \varepsilon D /
# n^2)^{-1/2}$. Where does it bend?

# %%
quote("0.0003", (1.08 / width**0.5) ** 2)
sizes = torch.logspace(-2, 2, 200)
rho = 1 - theory.shrinkage(sizes.numpy() / width**0.5, eps)
measured = []
for size in sizes:
    x = torch.randn(width)
    x = size * x / x.norm()
    measured.append((rms_norm(x, eps).norm() / width**0.5).item())
assert abs(torch.tensor(measured) - torch.from_numpy(rho)).max() < 1e-12
with in_style():
    figure, (panel,) = canvas(1, 1, 5.6, 3.2)
    panel.plot(sizes, rho, color=GREY, label="theory")
    panel.plot(sizes[::12], measured[::12], "o", color="#009E73", label="measured on random tokens")
    panel.axvline((width * eps) ** 0.5, color=GREY, linewidth=0.8, linestyle=":", label="√(D·eps)")
    panel.set(xscale="log", xlabel="norm of the token", ylabel="ρ: what eps leaves of the norm", ylim=(0, 1.05))
    panel.legend()
Picture(figure, "The factor rho is near one for norms above one and falls to zero below the root of width times eps.")

# %% [markdown]
# **What to see.** Above a norm of 1 the curve is flat: scale does not matter there. It bends at √(D·eps), which is 0.20
# here. Tokens below that are no longer only directions: to such a token its own length matters again, and the push
# shrinks with it. Qwen2.5-7B's embeddings have norm 0.80 and D = 3584, but its eps is 1e-6.

# %%
quote("0.20", (width * eps) ** 0.5)
qwen_loss = 100 * float(theory.shrinkage(0.80 / 3584**0.5, 1e-6))
quote("0.28", qwen_loss)

# %% [markdown]
# It loses 0.28 percent.
#
# ## Exercises
#
# **1.1** Write `rms_norm(x, eps)` for tokens `x` (..., D), without looking up.

# %%
my_rms_norm = ...
check("1.1", my_rms_norm)

# %% [markdown]
# **1.2** Build a *parallel* layer `f(h, attention, mlp)` whose update does ignore the scale of the tokens. `attention`
# and `mlp` are functions that normalise their input themselves.

# %%
my_layer = ...
check("1.2", my_layer)

# %% [markdown]
# **1.3** How long must a token of width $D$ be at least, so that eps takes no more than a given share of it? Write it
# as `f(width, eps, loss)`, with `loss` = $1 - \rho$.

# %%
my_norm = ...
check("1.3", my_norm)

# %% [markdown]
# **What you have now:** a branch pushes every token as if it had length one, and then adds the push to the token as it
# is. Next: what that does to the angle, in one line of algebra, and one place where the paper's own formula breaks.
# [Tutorial 2](02_the_formula.ipynb).
