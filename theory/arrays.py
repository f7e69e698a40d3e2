"""What every numeric function of this package does with its arguments, once.

Arguments may be numbers or arrays and broadcast. If every array among them is float32 the result is float32,
otherwise float64; the work is always done in float64 and rounded once at the end. Bad input is a `ValueError`
that names the argument and the first offending value.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[Any]

# The nearest float32 to π is larger than π; both neighbours of π are read as π itself.
LARGEST_ANGLE = float(np.float32(np.pi))


class Reader:
    """Reads named arguments as float64 arrays and remembers the precision of the answer."""

    def __init__(self, **arguments: ArrayLike) -> None:
        dtypes = {value.dtype for value in arguments.values() if isinstance(value, (np.ndarray, np.generic))}
        self.dtype = np.dtype(np.float32) if dtypes == {np.dtype(np.float32)} else np.dtype(np.float64)
        self.values = {name: self._read(name, value) for name, value in arguments.items()}
        try:
            np.broadcast_shapes(*(value.shape for value in self.values.values()))
        except ValueError:
            shapes = ", ".join(f"{name} {value.shape}" for name, value in self.values.items())
            raise ValueError(f"shapes do not broadcast: {shapes}") from None

    @staticmethod
    def _read(name: str, value: ArrayLike) -> Floats:
        try:
            array = np.asarray(value, dtype=np.float64)
        except (TypeError, ValueError):
            raise ValueError(f"{name} must be a number or an array of numbers, got {value!r}") from None
        require(name, array, np.isfinite(array), "finite")
        return array

    def __getitem__(self, name: str) -> Floats:
        return self.values[name]

    def nonnegative(self, *names: str) -> Reader:
        for name in names:
            require(name, self[name], self[name] >= 0, "at least 0")
        return self

    def positive(self, *names: str) -> Reader:
        for name in names:
            require(name, self[name], self[name] > 0, "greater than 0")
        return self

    def between(self, name: str, low: float, high: float) -> Reader:
        require(name, self[name], (self[name] >= low) & (self[name] <= high), f"between {low} and {high}")
        return self

    def angle(self, *names: str) -> Reader:
        """An angle in radians between 0 and π. The float32 neighbour of π, a little above π, is read as π."""
        for name in names:
            require(name, self[name], (self[name] >= 0) & (self[name] <= LARGEST_ANGLE), "an angle between 0 and π")
            self.values[name] = np.minimum(self[name], np.pi)
        return self

    def out(self, result: ArrayLike) -> Any:
        """The result in the precision of the arguments; a scalar if every argument was one."""
        with np.errstate(over="ignore", under="ignore"):
            return np.asarray(result).astype(self.dtype)[()]


def require(name: str, values: Floats, condition: ArrayLike, wanted: str) -> None:
    """Raises `ValueError` with the first value of `values` at which `condition` is false."""
    good = np.broadcast_to(condition, np.broadcast_shapes(np.shape(condition), values.shape))
    if not good.all():
        first = np.broadcast_to(values, good.shape)[~good].flat[0]
        raise ValueError(f"{name} must be {wanted}, got {first!s}")


def whole_number(name: str, value: Any, least: int) -> int:
    """An integer that is at least `least`, or a `ValueError` that names it."""
    if isinstance(value, bool) or int(value) != value or value < least:
        raise ValueError(f"{name} must be a whole number of at least {least}, got {value!r}")
    return int(value)
