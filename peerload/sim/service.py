"""Service times: distributions of mean 1, by their names on the command line and in reference cases."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import msgspec

from peerload.model.errors import ConfigError

Draw = Callable[[Random], float]

ALLOWED = "exp, det, h2:CV2 (≥ 1), bpareto:A,R (A > 0, R > 1), lognormal:CV2, weibull:SHAPE (≥ 0.1)"
VARIATION_MAX, SHAPE_MAX, RATIO_MAX, WEIBULL_MIN = 1e4, 100.0, 1e9, 0.1


class ServiceTimes(msgspec.Struct, frozen=True):
    """A distribution of mean 1 by name and parameters: ``exp``, ``det``, ``h2`` (squared coefficient of variation),
    ``lognormal`` (the same), ``weibull`` (shape; 1 is exponential), ``bpareto`` (shape, highest over lowest value)."""

    name: str = "exp"
    parameters: tuple[float, ...] = ()

    def __str__(self) -> str:
        """Text as typed: ``h2:10``."""
        return ":".join((self.name, *([",".join(f"{value:g}" for value in self.parameters)] * bool(self.parameters))))


def read_service(text: str) -> ServiceTimes:
    """Parse ``exp``, ``det``, ``h2:10``, ``bpareto:1.5,1000``. Raises ConfigError with the allowed values."""
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
        case "lognormal", (variation,) if 0 < variation <= VARIATION_MAX:
            sigma = math.sqrt(math.log1p(variation))
            return lambda rng: rng.lognormvariate(-sigma * sigma / 2, sigma)
        case "weibull", (shape,) if WEIBULL_MIN <= shape <= SHAPE_MAX:
            scale = 1 / math.gamma(1 + 1 / shape)
            return lambda rng: rng.weibullvariate(scale, shape)
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
    """Bounded Pareto distribution: density proportional to 1 / x^(shape + 1), between a lowest value and ``ratio``
    times that."""
    cut = 1 - ratio**-shape
    drawn = math.log(ratio) if shape == 1 else shape / (shape - 1) * (1 - ratio ** (1 - shape))
    mean = drawn / cut
    return lambda rng: (1 - rng.random() * cut) ** (-1 / shape) / mean


# -- arrivals that are not Poisson -----------------------------------------------------------------------------------

Rate = Callable[[float], float]
"""Factor on the mean arrival rate at a time; called with non-decreasing times."""
MODULATIONS = "mmpp:R,L (bursts of R > 1 times the quiet rate, each L on average), daily:A,P (0 < A ≤ 1, period P)"
BURST_MAX, PERIOD_MAX = 1e4, 1e9


class Modulation(msgspec.Struct, frozen=True):
    """Modulation of the arrival rate: ``mmpp`` (Markov-modulated: quiet and burst in turn, of exponential length) or
    ``daily`` (a sine). The mean rate stays."""

    name: str
    parameters: tuple[float, float]

    def __str__(self) -> str:
        """Text as typed: ``mmpp:10,50``."""
        return f"{self.name}:{self.parameters[0]:g},{self.parameters[1]:g}"

    @property
    def largest(self) -> float:
        first = self.parameters[0]
        return 2 * first / (1 + first) if self.name == "mmpp" else 1 + first

    def rate(self, rng: Random) -> Rate:
        """A random realization of the factor over time."""
        first, length = self.parameters
        if self.name == "daily":
            return lambda at: 1 + first * math.sin(2 * math.pi * at / length)
        is_burst, until = rng.random() < 0.5, 0.0  # noqa: PLR2004 -- as long the one as the other

        def factor(at: float) -> float:
            nonlocal is_burst, until
            while at >= until:
                is_burst, until = not is_burst, until + rng.expovariate(1 / length)
            return 2 * (first if is_burst else 1.0) / (1 + first)

        return factor


def read_modulation(text: str) -> Modulation:
    """Parse ``mmpp:10,50`` or ``daily:0.8,1000``. Raises ConfigError with the allowed values."""
    name, _, rest = text.partition(":")
    try:
        first, length = (float(part) for part in rest.split(","))
    except ValueError:
        first = length = math.nan
    limits = {"mmpp": (1.0, BURST_MAX), "daily": (0.0, 1.0)}
    low, high = limits.get(name, (0.0, -1.0))
    if not (low < first <= high and 0 < length <= PERIOD_MAX):
        raise ConfigError("arrivals", f"no arrivals {text!r}", why=f"allowed: {MODULATIONS}")
    return Modulation(name, (first, length))


class TaskClass(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Class of tasks in a mix. share: of the tasks; mean: of its service times (simulated s)."""

    share: float
    mean: float = 1.0
    service: ServiceTimes = ServiceTimes()
    cpus: float = 1.0
    gpus: int = 0


def read_class(text: str) -> TaskClass:
    """Parse ``share=0.2 mean=10 service=h2:4 cpus=2 gpus=1``. Only share is required. Raises ConfigError."""
    allowed = "share=0.2 mean=10 service=h2:4 cpus=2 gpus=1"
    try:
        fields: dict[str, Any] = dict(part.split("=", 1) for part in text.split())
        service = read_service(fields.pop("service", "exp"))
        numbers = {name: float(value) for name, value in fields.items()}
        found = msgspec.convert(numbers | {"service": service}, TaskClass, strict=False)
    except (ValueError, msgspec.ValidationError) as error:
        raise ConfigError("class", f"{text!r} is not a class of tasks: {error}", why=f"such as {allowed}") from None
    if not (
        0 < found.share <= 1 and 0 < found.mean <= RATIO_MAX and 0 < found.cpus <= SHAPE_MAX**2 and found.gpus >= 0
    ):
        raise ConfigError(
            "class", f"{text!r} is out of range", why="0 < share ≤ 1, mean and cpus more than 0, gpus 0 or more"
        )
    return found
