"""Links between hosts: the known names, and SPEED,LATENCY as text (pure)."""

from __future__ import annotations

import re
from dataclasses import dataclass

from paceline.errors import ConfigError


@dataclass(frozen=True)
class Link:
    """What a host's link carries in one direction, and the time of a short message from one host to another."""

    bytes_per_s: float
    latency_s: float


# Usable rates. Latencies are those of messages between processes, as usually published for these links.
NAMED = {
    "nvlink": Link(300e9, 3e-6),
    "pcie": Link(20e9, 5e-6),
    "ib400": Link(48e9, 4e-6),
    "100gbe": Link(12e9, 15e-6),
    "10gbe": Link(1.2e9, 30e-6),
}
SPEED = re.compile(r"([\d.]+)\s*([kmgt]?)(bit|b)(?:/s|ps)?", re.IGNORECASE)
LATENCY = re.compile(r"([\d.]+)\s*(us|µs|ms|s)", re.IGNORECASE)
DURATION = re.compile(r"([\d.]+)\s*([smhd])")
FACTORS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
SECONDS = {"us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0}
OF_DURATION = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def parse_link(text: str) -> Link:
    """The link with a name, or of a text such as `25gbit,20us`; `GB` are bytes, `gbit` are bits."""
    if (known := NAMED.get(text.lower())) is not None:
        return known
    speed_text, _, latency_text = text.partition(",")
    speed, latency = SPEED.fullmatch(speed_text.strip()), LATENCY.fullmatch(latency_text.strip())
    if speed is None or latency is None or not _number(speed[1]) or _number(latency[1]) is None:
        raise ConfigError(
            f"--link {text} is not a link; use {', '.join(NAMED)}, or SPEED,LATENCY such as 25gbit,20us or 3GB,0.1ms"
        )
    bits = 1 if speed[3].lower() == "bit" else 8
    return Link(float(speed[1]) * FACTORS[speed[2].lower()] * bits / 8, float(latency[1]) * SECONDS[latency[2].lower()])


def parse_duration(text: str) -> float:
    """Seconds of a text such as 90m or 12h."""
    found = DURATION.fullmatch(text.strip())
    if found is None or not _number(found[1]):
        raise ConfigError(f"--deadline {text} is not a time; write, for example, --deadline 12h, or 90m")
    return float(found[1]) * OF_DURATION[found[2]]


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
