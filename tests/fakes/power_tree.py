"""A directory tree like the kernel's, with energy counters and a chip that measures power, for `[energy] powercap, hwmon`."""

from __future__ import annotations

from pathlib import Path


class PowerTree:
    """The tree below ``root``. Joules that are drawn are added to the counters, which wrap."""

    def __init__(self, root: Path, range_uj: int = 262_143_328_850) -> None:
        self.root = root
        self.range_uj = range_uj
        self.counted_uj: dict[str, int] = {}

    @property
    def powercap(self) -> Path:
        """The directory of the zones."""
        return self.root / "powercap"

    @property
    def hwmon(self) -> Path:
        """The directory of the chips."""
        return self.root / "hwmon"

    def zone(self, number: str, name: str, start_uj: int = 0, tdp_w: float = 0.0) -> Path:
        """Add a zone such as ``intel-rapl:0``."""
        zone = self.powercap / number
        zone.mkdir(parents=True)
        (zone / "name").write_text(f"{name}\n")
        (zone / "max_energy_range_uj").write_text(f"{self.range_uj}\n")
        if tdp_w:
            (zone / "constraint_0_max_power_uw").write_text(f"{tdp_w * 1e6:.0f}\n")
        self.counted_uj[number] = start_uj
        self.draw(0.0, number)
        return zone

    def draw(self, joules: float, number: str = "intel-rapl:0") -> None:
        """Count so much more. Who reads meanwhile sees the old number or the new one."""
        self.counted_uj[number] = (self.counted_uj[number] + round(joules * 1e6)) % self.range_uj
        file = self.powercap / number / "energy_uj"
        new = file.with_suffix(".new")
        new.write_text(f"{self.counted_uj[number]}\n")
        new.replace(file)

    def chip(self, number: int, name: str, watts: float) -> None:
        """Add a chip, or change what it tells."""
        chip = self.hwmon / f"hwmon{number}"
        chip.mkdir(parents=True, exist_ok=True)
        (chip / "name").write_text(f"{name}\n")
        file = "power1_average" if name == "power_meter" else "power1_input"  # the kernel's names
        (chip / file).write_text(f"{watts * 1e6:.0f}\n")

    def card(self, number: int, name: str, place: str, **files: object) -> Path:
        """Add the chip of a GPU, or change what it tells: files of the chip, and (``device_x``) of the device at this address."""
        device, chip = self.root / "pci" / place, self.hwmon / f"hwmon{number}"
        chip.mkdir(parents=True, exist_ok=True)
        (device / "power").mkdir(parents=True, exist_ok=True)
        (chip / "name").write_text(f"{name}\n")
        if not (chip / "device").is_symlink():
            (chip / "device").symlink_to(device)
        for file, value in files.items():
            of_device = file.startswith("device_")
            path = device / file.removeprefix("device_").replace("__", "/") if of_device else chip / file
            path.write_bytes(value if isinstance(value, bytes) else f"{value}\n".encode())
        return chip

    def settings(self) -> str:
        """The table of the config file."""
        return f'[energy]\npowercap = "{self.powercap}"\nhwmon = "{self.hwmon}"\n'
