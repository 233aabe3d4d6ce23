"""Sets the rate and the delay of the links between hosts in network namespaces."""

from __future__ import annotations

import subprocess
from pathlib import Path


def set_link(spaces: list[str], delay: str, rate: str, delay_us: int) -> None:
    """Limit what each host sends to this rate, and deliver it after this delay, which a file holds."""
    if spaces:
        with Path(delay).open("r+b") as file:  # in place: the other process has it mapped
            file.write(delay_us.to_bytes(4, "little"))
    for space in spaces:
        command = f"tc -n {space} qdisc replace dev eth0 root tbf rate {rate} burst 20000 limit 100000000"
        subprocess.run(command.split(), check=True)
