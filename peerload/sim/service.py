"""Service times: distributions of mean 1, by the names they have on the command line and in reference cases."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from random import Random

import msgspec

from peerload.model.errors import ConfigError

Draw = Callable[[Random], float]

ALLOWED = "exp, det, h2:CV2 (≥ 1), bpareto:A,R (A > 0, R > 1)"
VARIATION_MAX, SHAPE_MAX, RATIO_MAX = 1e4, 100.0, 1e9


class ServiceTimes(msgspec.Struct, frozen=True):
    """A distribution of mean 1 by name and parameters: ``exp``, ``det``, ``h2`` (squared coefficient of variation),
    ``bpareto`` (shape, highest over lowest value)."""

    name: str = "exp"
    parameters: tuple[float, ...] = ()

    def __str__(self) -> str:
        """Text as typed: ``h2:10``."""
        return ":".join((self.name, *([",".join(f"{value:g}" for value in self.parameters)] * bool(self.parameters))))


def read_service(text: str) -> ServiceTimes:
    """Parse ``exp``, ``det``, ``h2:10``, ``bpareto:1.5,1000``. Raises ConfigError that names what is allowed."""
    name, _, rest = text.partition(":")
    try:
        service = ServiceTimes(name, tuple(float(part) for part in rest.split(",") if part.strip()))
    except ValueError:
        raise ConfigError("service", f"{text!r} has no numbers behind its name", why=f"allowed: {ALLOWED}") from None
    draw_of(service.name, service.parameters)
    return service


def draw_of(name: str, parameters: Sequence[float]) -> Draw:
    """Make a function that draws one value of mean 1. Raises ConfigError for an unknown name or parameters."""
    match name, tuple(parameters):
        case "exp", ():
            return lambda rng: rng.expovariate(1.0)
        case "det", ():
            return lambda _rng: 1.0
        case "h2", (variation,) if 1 <= variation <= VARIATION_MAX:
            return _hyperexponential(variation)
        case "bpareto", (shape, ratio) if 0 < shape <= SHAPE_MAX and 1 < ratio <= RATIO_MAX:
            return _bounded_pareto(shape, ratio)
        case _:
            written = ",".join(f"{value:g}" for value in parameters)
            raise ConfigError("service", f"no distribution {name}:{written}".rstrip(":"), why=f"allowed: {ALLOWED}")


def _hyperexponential(variation: float) -> Draw:
    """Hyperexponential distribution: two phases with balanced means; variation: the squared coefficient of
    variation, ≥ 1."""
    first = (1 + math.sqrt((variation - 1) / (variation + 1))) / 2
    return lambda rng: rng.expovariate(2 * first) if rng.random() < first else rng.expovariate(2 * (1 - first))


def _bounded_pareto(shape: float, ratio: float) -> Draw:
    """Bounded Pareto distribution: density in proportion to 1 / x^(shape + 1), between a lowest value and ``ratio``
    times that."""
    cut = 1 - ratio**-shape
    drawn = math.log(ratio) if shape == 1 else shape / (shape - 1) * (1 - ratio ** (1 - shape))
    mean = drawn / cut
    return lambda rng: (1 - rng.random() * cut) ** (-1 / shape) / mean
