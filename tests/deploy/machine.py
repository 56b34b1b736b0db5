"""A machine of its own to install on: a Debian with its own kernel, its own root file system and systemd as process 1, in QEMU.
Nothing of this machine is in it but the files that are put there, and it has no network.

Made below one directory, from packages alone: `guest-SUITE` is the machine's root file system, `tools` another one in which QEMU is
installed and run. Both are kept for the next time. What runs in the machine is tests/deploy/trial.py, which tells what it has
seen on a disk of its own (told.py).
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.deploy import told

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[2]
SUITES = {"bookworm": "3.11", "trixie": "3.13"}
"""The Debians that it is tried on, and the Python of each."""
CPU = {"bookworm": "max", "trixie": "max,-cx16"}
"""The kernel of Debian 13 does not survive how QEMU 7.2 emulates one instruction, and does without it."""
SUITE = os.environ.get("SUITE") or "bookworm"
TOOLS_SUITE = "bookworm"
GUEST_PACKAGES = (
    "systemd,systemd-sysv,dbus,udev,libpam-systemd,python3,python3-venv,ca-certificates,procps,iproute2,zstd"
)
KERNEL = ("linux-image-cloud-amd64", "initramfs-tools")
EMULATOR = ("qemu-system-x86", "seabios")
DISK_BYTES = 4 << 30
MEMORY_MIB = 1536
RUN_S_MAX = 5400.0
"""Without KVM, on a processor that has other work, all steps together have taken 40 minutes."""
LOOK_S = 0.5
FREE_BYTES_MIN = 8 << 30
ALONE = ("unshare", "--mount", "--pid", "--fork", "--kill-child")
"""What is mounted or started meanwhile is gone with it."""
UNIT = """[Unit]
Description=what is tried out on this machine
After=network.target dbus.service systemd-logind.service
[Service]
Type=oneshot
TimeoutStartSec=infinity
StandardOutput=file:/dev/ttyS1
StandardError=file:/dev/ttyS1
WorkingDirectory=/trial
Environment=PYTHONUNBUFFERED=1 PATH=/usr/local/bin:/usr/local/sbin:/usr/bin:/usr/sbin
ExecStart=/usr/bin/python3 -m tests.deploy.trial /dev/vdb
ExecStopPost=/bin/systemctl poweroff --force
[Install]
WantedBy=multi-user.target
"""


class CannotBeMade(Exception):
    """This machine cannot make another one: why."""


def command(*words: str | Path, root: Path | None = None, timeout_s: float = 900.0) -> str:
    """Run a command to its end, in that root file system → its output. Raises CannotBeMade with the end of what it said."""
    before = [*ALONE, f"--root={root}", "--mount-proc", "--"] if root is not None else []
    done = subprocess.run(
        [*before, *map(str, words)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, "DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C.UTF-8"},
        check=False,
        timeout=timeout_s,
    )
    told = done.stdout.decode("utf-8", "replace")
    if done.returncode:
        raise CannotBeMade(f"{' '.join(map(str, words[:3]))}: {told.strip()[-400:]}")
    return told


def directory() -> Path:
    """Where machines are kept."""
    return Path(os.environ.get("PEERLOAD_DEPLOY_DIR") or ROOT / "build" / "deploy")


def guest() -> Path:
    """The root file system of the machine, made once. Raises CannotBeMade."""
    return base(f"guest-{SUITE}", SUITE, GUEST_PACKAGES, KERNEL)


def tools() -> Path:
    """The one in which QEMU runs, made once. Raises CannotBeMade."""
    return base("tools", TOOLS_SUITE, "ca-certificates", EMULATOR)


def base(name: str, suite: str, include: str, packages: tuple[str, ...]) -> Path:
    """A Debian root file system of its own with these packages, made once. Raises CannotBeMade."""
    made = directory() / name
    if made.is_dir():
        return made
    if suite not in SUITES:
        raise CannotBeMade(f"SUITE={suite} is none of {', '.join(SUITES)}")
    part = directory() / f"{name}.part"
    shutil.rmtree(part, ignore_errors=True)
    part.parent.mkdir(parents=True, exist_ok=True)
    bootstrap = _debootstrap()
    mirror = _mirror()
    command(*ALONE, *bootstrap, "--variant=minbase", f"--include={include}", suite, part, mirror)
    for file in Path("/etc/apt/apt.conf.d").glob("99*"):
        shutil.copy(file, part / "etc/apt/apt.conf.d")
    for known in ("resolv.conf", "hosts"):
        shutil.copy(Path("/etc", known), part / "etc" / known)
    (part / "etc/apt/sources.list").write_text(f"deb {mirror} {suite} main\n", encoding="utf-8")
    command("apt-get", "update", "-qq", root=part)
    command("apt-get", "install", "-y", "-qq", "--no-install-recommends", *packages, root=part)
    command("apt-get", "clean", root=part)
    part.rename(made)
    return made


def _debootstrap() -> list[str]:
    """How it is called; it is fetched, and not installed, where it is missing."""
    found = shutil.which("debootstrap")
    if found:
        return [found]
    place = directory() / "debootstrap"
    if not place.is_dir():
        packages = directory() / "packages"
        packages.mkdir(parents=True, exist_ok=True)
        try:
            subprocess.run(["apt-get", "-qq", "update"], check=False, capture_output=True, timeout=300)
            subprocess.run(["apt-get", "-qq", "download", "debootstrap"], cwd=packages, check=True, capture_output=True)
        except (OSError, subprocess.SubprocessError) as error:
            raise CannotBeMade(f"debootstrap is not to be had here: {error}") from None
        (package,) = packages.glob("debootstrap*.deb")
        command("dpkg", "-x", package, place)
    os.environ["DEBOOTSTRAP_DIR"] = str(place / "usr/share/debootstrap")
    return [str(place / "usr/sbin/debootstrap")]


def _mirror() -> str:
    """Where this machine has its own packages from."""
    for file in (*Path("/etc/apt/sources.list.d").glob("*.sources"), Path("/etc/apt/sources.list")):
        if file.is_file():
            for line in file.read_text(encoding="utf-8").splitlines():
                words = line.split()
                if words[:1] in (["URIs:"], ["deb"]):
                    return next(word for word in words[1:] if "://" in word)
    raise CannotBeMade("this machine has no Debian mirror")


# -- what is installed there -------------------------------------------------------------------------------------------


def wheels() -> Path:
    """The packages that peerload needs, as files: made once. Raises CannotBeMade."""
    python = SUITES[SUITE]
    place = directory() / f"wheels-{python}"
    if not place.is_dir():
        part = directory() / f"wheels-{python}.part"
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--only-binary", ":all:", "--python-version", python]
        command(*pip, "--require-hashes", "-r", ROOT / "deploy/requirements.txt", "-d", part)
        part.rename(place)
    return place


def wheel(version: str, broken: str = "") -> Path:
    """peerload as it is in this tree, with another version's number. ``broken``: a line that the agent begins with."""
    place = directory() / f"built-{SUITE}" / version
    shutil.rmtree(place, ignore_errors=True)
    source = place / "source"
    source.mkdir(parents=True)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("peerload", "policies"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    init = source / "peerload/__init__.py"
    lines = init.read_text(encoding="utf-8").splitlines()
    lines = [f'__version__ = "{version}"' if line.startswith("__version__") else line for line in lines]
    init.write_text("\n".join(lines) + "\n", encoding="utf-8")
    if broken:
        main = source / "peerload/agent/main.py"
        main.write_text(main.read_text(encoding="utf-8") + f"\n{broken}\n", encoding="utf-8")
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    command(*pip, "-w", place, source)
    shutil.rmtree(source)
    (found,) = place.glob("*.whl")
    return found


def _mark(wheel_there: Path) -> str:
    """What deploy/install calls the version that it makes of it."""
    pins = (ROOT / "deploy/requirements.txt").read_bytes()
    return hashlib.sha256(wheel_there.read_bytes() + pins).hexdigest()[:12]


def installed(*wheels_there: Path) -> Path:
    """These, installed into a root file system of the same kind by deploy/install → its `versions`. QEMU without KVM would take
    minutes for each; what is left to do in the machine is what needs its systemd."""
    scratch = directory() / f"scratch-{SUITE}"
    versions, kept = scratch / "opt/peerload/versions", directory() / f"versions-{SUITE}"
    shutil.rmtree(scratch, ignore_errors=True)
    shutil.rmtree(kept, ignore_errors=True)
    kept.mkdir()
    command("cp", "-a", "--one-file-system", guest(), scratch)
    first = ""
    for one in wheels_there:
        mark = _mark(one)
        if not first:
            command(ROOT / "deploy/install", "--root", scratch, "--wheels", wheels(), "--from", one)
            first = mark
        else:  # the packages it needs are the same: only peerload itself is put over a copy
            command("cp", "-a", kept / first, versions / mark)
            for file in (versions / mark / "bin").iterdir():
                if file.is_file() and not file.is_symlink():
                    file.write_bytes(file.read_bytes().replace(first.encode(), mark.encode()))
            shutil.copy(one, scratch / "tmp")
            python = f"/opt/peerload/versions/{mark}/bin/python"
            command(python, "-m", "pip", "-q", "install", "--no-deps", "--no-index", f"/tmp/{one.name}", root=scratch)
        command("cp", "-a", versions / mark, kept / mark)
    shutil.rmtree(scratch)
    return kept


# -- the machine -------------------------------------------------------------------------------------------------------


def check() -> None:
    """Raises CannotBeMade where there is no hope of one."""
    if os.geteuid() != 0:
        raise CannotBeMade("only root can make a root file system")
    directory().mkdir(parents=True, exist_ok=True)
    if shutil.disk_usage(directory()).free < FREE_BYTES_MIN:
        raise CannotBeMade(f"there are less than {FREE_BYTES_MIN >> 30} GiB free below {directory()}")


def boot(files: dict[str, Path], versions: Path | None = None, only: str = "") -> Iterator[dict[str, Any]]:
    """Start a fresh machine with these files in /trial (name → file or directory) and what `installed` has made, have it run the
    trial (``only``: of its steps these, in a line), yield each thing that it tells, and return when it is switched off. Raises
    CannotBeMade."""
    check()
    root, run = guest(), tools() / f"run-{SUITE}"
    shutil.rmtree(run, ignore_errors=True)
    run.mkdir()
    trial = root / "trial"
    shutil.rmtree(trial, ignore_errors=True)
    (trial / "tests/deploy").mkdir(parents=True)
    for name, file in files.items():
        (shutil.copytree if file.is_dir() else shutil.copy)(file, trial / name)
    for file in (ROOT / "tests/deploy").glob("t*.py"):
        shutil.copy(file, trial / "tests/deploy")
    if only:
        (trial / "only").write_text(only, encoding="utf-8")
    shutil.rmtree(root / "opt/peerload", ignore_errors=True)
    if versions is not None:
        command("cp", "-a", versions, trial / "made")
    (root / "etc/hostname").write_text("trial\n", encoding="utf-8")
    (root / "etc/systemd/system/trial.service").write_text(UNIT, encoding="utf-8")
    wants = root / "etc/systemd/system/multi-user.target.wants"
    wants.mkdir(exist_ok=True)
    with contextlib.suppress(FileExistsError):
        (wants / "trial.service").symlink_to("/etc/systemd/system/trial.service")
    command("mke2fs", "-q", "-t", "ext4", "-d", root, run / "disk", str(DISK_BYTES >> 10))
    with (run / "told").open("wb") as disk:
        disk.truncate(told.DISK_BYTES)
    for kind in ("vmlinuz", "initrd.img"):
        newest = max((root / "boot").glob(f"{kind}-*"))
        shutil.copy(newest, run / kind)
    yield from _heard(run)


def _heard(run: Path) -> Iterator[dict[str, Any]]:
    inside = f"/{run.name}"
    words = ["qemu-system-x86_64", "-accel", "tcg,thread=multi", "-cpu", CPU[SUITE], "-smp", "2", "-m", str(MEMORY_MIB)]
    words += ["-kernel", f"{inside}/vmlinuz", "-initrd", f"{inside}/initrd.img"]
    words += ["-append", "root=/dev/vda rw console=ttyS0 quiet panic=-1 systemd.show_status=0"]
    for disk in ("disk", "told"):
        words += ["-drive", f"file={inside}/{disk},if=virtio,format=raw,cache=unsafe"]
    words += ["-nographic", "-nodefaults", "-nic", "none", "-no-reboot"]
    for line in ("console", "trial"):
        words += ["-serial", f"file:{inside}/{line}"]
    with (run / "qemu").open("wb") as said:
        machine = subprocess.Popen(
            ["timeout", str(RUN_S_MAX), "chroot", str(tools()), *words],
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
        )
    number = 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # which ends the machine below
    try:
        while True:
            is_over = machine.poll() is not None
            said_now = told.heard(str(run / "told"), number)
            if said_now is not None:
                number += 1
                yield said_now
            elif is_over:
                break
            else:
                time.sleep(LOOK_S)
        if machine.returncode:
            raise CannotBeMade(f"QEMU ended with {machine.returncode}: {_end(run / 'qemu')} {_end(run / 'trial')}")
        if not number:
            raise CannotBeMade(f"the machine has told nothing: {_end(run / 'console')} {_end(run / 'trial')}")
    finally:
        if machine.poll() is None:
            machine.terminate()
            machine.wait()
        (run / "disk").unlink(missing_ok=True)


def _end(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace").strip()[-600:]
