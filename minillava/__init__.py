"""minillava: grow a small LLaVA and measure how its tokens turn."""

__version__ = "0.1.0"
