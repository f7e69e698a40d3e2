"""theory: how tokens must turn inside a Pre-Norm transformer."""
