"""minillava: grow a small LLaVA and measure how its tokens turn."""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"
_ALIGN = ("align", "load_aligned", "unalign")  # loaded when first used: `import minillava` stays light


def __getattr__(name: str) -> Any:
    if name not in _ALIGN:
        raise AttributeError(f"module 'minillava' has no attribute {name!r}")
    return getattr(import_module("minillava.hf_align"), name)
