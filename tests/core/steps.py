"""The oracle of steps: what optimizers do to the numbers of one row, an operation at a time."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt

SGD, ADAM, ADAGRAD, ROWWISE = range(1, 5)
MAXIMIZE, DECOUPLED, MOMENTUM, NESTEROV = 1, 2, 4, 8

Numbers = npt.NDArray[np.floating[Any]]


def _exactly(a: float, b: float, c: float) -> float:
    return float(Fraction(a) * Fraction(b) + Fraction(c))


def fma(a: Any, b: Any, c: Any) -> Any:
    """Return a * b + c, rounded once.

    A product of two float32 is exact in float64, whose sum with a third is rounded to float32 as
    the exact sum is, but for about one in 2**29.
    """
    kind = np.result_type(a, b, c)
    if kind == np.float32:
        return (np.float64(a) * np.float64(b) + np.float64(c)).astype(np.float32)
    return np.frompyfunc(_exactly, 3, 1)(a, b, c).astype(kind)


def lerp(start: Any, end: Any, part: Any) -> Any:
    if part < 0.5:
        return fma(part, end - start, start)
    return fma(part - part.dtype.type(1), end - start, end)


class Step:
    """A step of a rule, with flags and its eight numbers, of the type of the weights."""

    def __init__(self, rule: int, flags: int, numbers: Numbers) -> None:
        self.rule, self.flags, self.numbers = rule, flags, numbers

    def prepared(self, gradient: Numbers, weight: Numbers) -> Numbers:
        if self.flags & MAXIMIZE:
            gradient = -gradient
        decay = self.numbers[0]
        return fma(decay, weight, gradient) if decay != 0 else gradient

    def begin(self, weight: Numbers, states: list[Numbers], gradient: Numbers) -> Numbers:
        """Change the states in place; return what roots are taken of."""
        g = self.prepared(gradient, weight)
        if self.rule == ADAM:
            toward, beta, other = self.numbers[2:5]
            states[0][:] = lerp(states[0], g, toward)
            states[1][:] = fma(other * g, g, states[1] * beta)
            return states[1].copy()
        if self.rule == ADAGRAD:
            states[0][:] = fma(g, g, states[0])
        elif self.rule == ROWWISE:
            squares = np.zeros(-(-g.size // 32) * 32, g.dtype)
            squares[: g.size] = g * g
            parts = squares.reshape(-1, 32)
            total = parts[0]
            for part in parts[1:]:
                total = total + part
            while total.size > 1:
                total = total[: total.size // 2] + total[total.size // 2 :]
            states[0][:] = states[0] + total * g.dtype.type(1 / g.size)
        return states[0].copy()

    def end(
        self, weight: Numbers, states: list[Numbers], gradient: Numbers, roots: Numbers
    ) -> None:
        """Change the weight in place, and the state of SGD."""
        rate = self.numbers[1]
        if self.rule == ADAM:
            *_, correction, eps, kept = self.numbers
            if self.flags & DECOUPLED:
                weight *= kept
            weight += rate * states[0] / (roots / correction + eps)
            return
        g = self.prepared(gradient, weight)
        if self.rule == ADAGRAD:
            weight += rate * g / (roots + self.numbers[2])
        elif self.rule == ROWWISE:
            weight += g * rate / (roots + self.numbers[2])
        else:
            momentum, undamped, first = self.numbers[2:5]
            if self.flags & MOMENTUM:
                states[0][:] = g if first else fma(undamped, g, states[0] * momentum)
                g = fma(momentum, states[0], g) if self.flags & NESTEROV else states[0]
            weight[:] = fma(rate, g, weight)
