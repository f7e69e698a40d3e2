# %% [markdown]
# # Bonus: spot the bug
#
# **Question: five programs run without an error and are wrong. What gives them away?**
#
# None of these bugs crashes. The losses go down, the text looks like text. Each of them has been made many times, by
# people who know what they are doing. You get a measurement that cannot be right. Find the reason before you read on:
# the repair is the exercise, and `check` will tell.

# %%
import numpy as np
import torch
import torch.nn.functional as F
from exercises import check
from reader import GREY, Picture, quote

import theory
from minillava.norm_align import NormAlign
from minillava.style import MODALITY_COLOURS, MODALITY_LINES, canvas, in_style
from minillava.tokenizer import END, IGNORE

torch.manual_seed(0)
torch.set_num_threads(1)

# %% [markdown]
# ## Bug 1: the token that forgets
#
# A Pre-Norm block, twelve times. The branch is a random layer that makes updates of norm about 1.
#
# **Predict.** A visual token enters with norm 40, a text token with norm 1. You know from tutorial 3 what twelve such
# layers do. What do you expect to see?


# %%
def norm(h):
    return h / h.pow(2).mean(-1, keepdim=True).sqrt()


weights = torch.randn(12, 64, 64) / 64  # an update of norm 1 from a normalised token of width 64


def suspicious_block(h, weight):
    h = norm(h)
    return h + h @ weight


def follow(block, size):
    h = size * norm(torch.randn(200, 64)) / 8
    norms = [h.norm(dim=-1).mean().item()]
    for weight in weights:
        h = block(h, weight)
        norms.append(h.norm(dim=-1).mean().item())
    return norms


traces = {name: follow(suspicious_block, size) for name, size in (("visual", 40.0), ("text", 1.0))}
with in_style():
    figure, (panel,) = canvas(1, 1, 5.6, 3.0)
    for name, values in traces.items():
        panel.plot(values, color=MODALITY_COLOURS[name], linestyle=MODALITY_LINES[name], label=name)
    panel.set(xlabel="layer", ylabel="mean norm", yscale="log")
    panel.legend()
Picture(figure, "Both tokens have the same norm after the very first layer, and keep it.")

# %% [markdown]
# **What to see.** After the first layer both curves lie on each other, for good. That is not how a Pre-Norm network
# behaves, and a study of norms on this model would have concluded that the whole effect does not exist.

# %%
assert abs(traces["visual"][1] / traces["text"][1] - 1) < 0.02
assert abs(traces["visual"][12] / traces["text"][12] - 1) < 0.02

# %% [markdown]
# **11.1** Write the block as it should be: `f(h, norm, branch)`.

# %%
my_block = ...
check("11.1", my_block)

# %% [markdown]
# ## Bug 2: the variance that is not there
#
# A LayerNorm, in single precision, tested on random tokens. It agrees with PyTorch. Then real features come, whose mean
# is far from zero.


# %%
def suspicious_layer_norm(x, eps=1e-5):
    mean = x.mean(-1, keepdim=True)
    variance = (x * x).mean(-1, keepdim=True) - mean * mean
    return (x - mean) / torch.sqrt(variance + eps)


tokens = torch.randn(100, 256)
for offset in (0.0, 30.0, 3000.0):
    x = tokens + offset
    y, truth = suspicious_layer_norm(x), F.layer_norm(x.double(), (256,))
    error = (y - truth).abs().nan_to_num(posinf=0).max().item()
    print(f"mean {offset:6g}: largest error {error:.1e}, NaN in {y.isnan().any(-1).sum().item()} of 100 tokens")
    assert torch.allclose(y.double(), truth, atol=1e-2) == (offset < 3000)

# %% [markdown]
# **11.2** Write `variance(x)` over the last dimension (population variance, single precision in and out), so that it
# survives a large mean.

# %%
my_variance = ...
check("11.2", my_variance)

# %% [markdown]
# ## Bug 3: the model that never stops
#
# The tokenizer has no padding token. So the end token is used for padding, and of course one must not train on padding.
# After training the model writes well and does not stop.


# %%
def suspicious_labels(ids):
    return torch.where(ids == END, IGNORE, ids)


answers = torch.tensor([[17, 21, 9, END, END, END], [30, 12, END, END, END, END], [11, 14, 25, 40, 8, END]])
taught = (suspicious_labels(answers) == END).sum().item()
print(f"answers: {len(answers)}, labels that teach to stop: {taught}")
assert taught == 0

# %% [markdown]
# **11.3** Write `labels(ids, lengths, end)`: `lengths` (B,) counts the real tokens of each row, the one `end` that
# closes the answer included. Unsupervised positions get -100. (How does this package avoid the question? See `END` and
# `PAD` in `minillava/tokenizer.py`.)

# %%
my_labels = ...
check("11.3", my_labels)

# %% [markdown]
# ## Bug 4: the perfect model with a terrible loss
#
# An oracle that always puts everything on the right next token. Its loss should be zero.


# %%
def suspicious_loss(logits, labels):
    """logits (B, T, V); labels (B, T) from the data loader, where labels[:, t] is the token that follows position t."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


ids = torch.arange(12)[None] % 5
labels = ids.roll(-1, dims=1)  # what follows
oracle = 20.0 * F.one_hot(labels, 5).float()
loss = suspicious_loss(oracle, labels).item()
quote("20.0", loss)

# %% [markdown]
# The loss is 20.0, the largest there is with these logits: the oracle is wrong *every* time. A trained model would have
# learned to predict the token after the next one, which is possible to a degree, and so its loss would have gone down.
#
# **11.4** Repair it: `loss(logits, labels)` for such a loader.

# %%
my_loss = ...
check("11.4", my_loss)

# %% [markdown]
# ## Bug 5: the quiet tokens
#
# The paper's fix: one LayerNorm after the projector with gain T/√D, so that visual tokens leave with norm T. Somebody
# copied the module and mistyped one constant. With one projector all is well, with another the tokens come out too
# quiet.
#
# **Predict.** Which constant is it, if the error depends on how large the *input* is?

# %%
T, width = 1.08, 256
mistyped = 0.1
suspicious = NormAlign(width, gain=T / width**0.5, eps=mistyped)
sizes = np.logspace(-1, 2, 40)
with torch.no_grad():
    out = [suspicious(size * norm(torch.randn(50, width)) / width**0.5).norm(dim=-1).mean().item() for size in sizes]
with in_style():
    figure, (panel,) = canvas(1, 1, 5.6, 3.0)
    panel.plot(sizes, out, color="#009E73", label="measured")
    panel.axhline(T, color=GREY, linestyle=":", label="wanted: T")
    panel.set(xscale="log", xlabel="norm of the projector's output", ylabel="norm after alignment", ylim=(0, 1.2))
    panel.legend()
Picture(figure, "The output norm reaches T only for inputs whose norm is well above five.")

# %% [markdown]
# **What to see.** Loud inputs leave with norm T, as they should. Below a norm of about ten they leave too quiet, and
# the quieter they came the worse it is.

# %%
predicted = T * (1 - theory.shrinkage(sizes / width**0.5, mistyped))
assert abs(np.array(out) / predicted - 1).max() < 0.02
assert out[-1] > 0.99 * T
assert out[0] < 0.1 * T

# %% [markdown]
# **11.5** An input of norm 5 and width 256 comes out at 0.703 times the wanted norm. Another copy has another wrong
# eps, and there it comes out at half of it. Which eps is in there? Give the number.

# %%
quote("0.703", 1 - theory.shrinkage(5 / 16, mistyped))
my_eps = ...
check("11.5", my_eps)

# %% [markdown]
# **What you have now:** five ways to be wrong in silence, and for each a measurement that speaks. None of them needed a
# trained model. Write the measurement first.
