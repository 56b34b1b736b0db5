"""Energy of this node: joules from the best power sensor and from its GPUs, divided among tasks, other programs and idling.

Joules are read at each sample of the load. They are divided at the end of a window, which is longer if many tasks run, since the
launcher has to read the processor time of each. The accounts are written to STATE/energy.db every KEPT_EVERY samples, without a
sync: a killed agent only loses the division of the last seconds' joules, since the counters continue.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sqlite3
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from peerload.agent.runtime import now
from peerload.agent.sensors.power import (
    Hwmon,
    PowercapCounters,
    PowerCommand,
    PowerModel,
    PowerSource,
    processor,
    store_profile,
)
from peerload.agent.sensors.processes import read_text_of
from peerload.energy import accounting
from peerload.energy.profile import BadProfile, Level, PowerProfile, decoded, fitted, levels_of
from peerload.launcher.powercap import Powercap
from peerload.launcher.protocol import USAGE_KEYS_MAX
from peerload.model import metrics
from peerload.model.errors import BadRequest, StoreError
from peerload.model.events import PowerMeasured
from peerload.model.metrics import labelled
from peerload.model.resources import Quality, estimated_curve
from peerload.security.private_files import machine_boot_id

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from peerload.agent.runtime import EventSink
    from peerload.agent.sensors.gpus import Gpus
    from peerload.core.node import Node
    from peerload.launcher.powercap import Reading
    from peerload.launcher.protocol import UsageEvent
    from peerload.model.config import AgentConfig
    from peerload.model.events import Instant
    from peerload.model.resources import DeviceReading, PowerCurve
    from peerload.model.task import Exit
    from peerload.wire.control import KeepPowerProfile as PowerProfileRequest

log = logging.getLogger("peerload.agent")

DATABASE = "energy.db"
PRIMARY_CODE = 0xFF
"""Mask of the primary error code in an extended one of SQLite."""
TASKS_PER_SAMPLE = 32
"""Maximum number of running tasks whose processor time is read at each sample; with more, it is read less often."""
SCAN_EVERY = 5
"""Number of samples between readings of processor times if the launcher has to scan /proc for them."""
KEPT_EVERY = 5
PRUNED_EVERY = 1800
CARD_SILENT_S = 15.0
"""Silence after which a GPU counts as lost; that time is a gap."""
SLEPT_S_MIN = 1.0
"""Minimum difference of the clocks that counts as a suspension, since they are not read at the same time."""
_COLUMNS = "since, until, joules, tasks_joules, other_joules, idle_joules, gap_s, quality, scope, source"


class UsageSource(Protocol):
    """The interface of the launcher for energy accounting. units: its containment backend."""

    units: str

    async def usage(self, keys: Sequence[str], *, brief: bool, counters: bool) -> UsageEvent | None:
        """Usage of these tasks; None if the launcher does not answer."""


class EnergyCheckpoint(msgspec.Struct):
    """Checkpoint of the energy accounts, from which the next agent continues. boot: of the machine; at_s: end of the last
    window, by its boot clock; slept_s: at the last sample."""

    boot: str = ""
    at_s: float = 0.0
    slept_s: float = 0.0
    machine_s: float = 0.0
    own_s: float = 0.0
    joules: float = 0.0
    """Joules read since ``at_s``; gap_s also counts from then."""
    gap_s: float = 0.0
    account: accounting.EnergyAccount = msgspec.field(default_factory=accounting.EnergyAccount, name="book")
    counters: dict[str, accounting.Counter] = {}
    cards: dict[str, accounting.Counter] = {}
    idle: dict[str, accounting.IdlePower] = {}


class EnergyStore:
    """Database STATE/energy.db: totals of each minute, and the checkpoint from which the next agent continues. An
    unusable file is replaced by an empty one."""

    def __init__(self, path: Path) -> None:
        """path: of the database. It is in memory if the file can be neither opened nor created, for example on a full
        disk."""
        try:
            self._database = self._opened(path)
        except (OSError, sqlite3.Error) as error:
            if getattr(error, "sqlite_errorcode", 0) & PRIMARY_CODE in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
                log.warning("energy accounts are lost, starting a new file: path=%s error=%s", path, error)
                for suffix in ("", "-wal", "-shm"):
                    Path(f"{path}{suffix}").unlink(missing_ok=True)
                self._database = self._opened(path)
            else:
                log.warning("energy accounts are not kept until the next start: path=%s error=%s", path, error)
                self._database = self._opened(None)

    @staticmethod
    def _opened(path: Path | None) -> sqlite3.Connection:
        if path is not None:
            path.touch(mode=0o600)
        database = sqlite3.connect(path or ":memory:", isolation_level=None, check_same_thread=False)
        database.execute("PRAGMA journal_mode=WAL")
        database.execute("PRAGMA synchronous=NORMAL")
        database.executescript(
            "CREATE TABLE IF NOT EXISTS totals (since REAL PRIMARY KEY, until REAL, joules REAL, tasks_joules REAL,"
            " other_joules REAL, idle_joules REAL, gap_s REAL, quality TEXT, scope TEXT, source TEXT);"
            "CREATE TABLE IF NOT EXISTS kept (key INTEGER PRIMARY KEY, body BLOB);"
        )
        return database

    def checkpoint(self) -> EnergyCheckpoint:
        """The counters that the previous agent stored."""
        row = self._database.execute("SELECT body FROM kept").fetchone()
        try:
            return msgspec.json.decode(row[0], type=EnergyCheckpoint) if row else EnergyCheckpoint()
        except msgspec.DecodeError as error:
            log.warning("energy accounts of running tasks are lost: error=%s", error)
            return EnergyCheckpoint()

    def write(self, kept: bytes, totals: accounting.Totals | None, keep_since: float = 0.0) -> None:
        """Write checkpoint and totals in one transaction. keep_since: totals that ended before are removed."""
        with self._database as database:  # rolled back where a step fails
            database.execute("BEGIN")
            database.execute("INSERT OR REPLACE INTO kept VALUES (0, ?)", (kept,))
            if totals is not None:
                row = tuple(msgspec.to_builtins(getattr(totals, name)) for name in _COLUMNS.split(", "))
                database.execute("INSERT OR REPLACE INTO totals VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", row)
            if keep_since:
                database.execute("DELETE FROM totals WHERE until < ?", (keep_since,))

    def totals(self, since: float, besides: float = -1.0) -> list[accounting.Totals]:
        """Totals that end after ``since``, in order, one for each source; without those that begin at ``besides``."""
        rows = self._database.execute(
            "SELECT min(since), max(until), sum(joules), sum(tasks_joules), sum(other_joules), sum(idle_joules), sum(gap_s),"
            " quality, scope, source FROM totals WHERE until > ? AND since <> ? GROUP BY quality, scope, source ORDER BY 1",
            (since, besides),
        )
        return [msgspec.convert(dict(zip(_COLUMNS.split(", "), row, strict=True)), accounting.Totals) for row in rows]

    def close(self) -> None:
        self._database.close()


class EnergySensors:
    """The energy accounting of one node."""

    def __init__(
        self,
        config: AgentConfig,
        node: Node,
        gpus: Gpus,
        launcher: UsageSource,
        store: EnergyStore,
        inbox: EventSink,
        clock: Callable[[], Instant] = now,
    ) -> None:
        self._now = clock
        self._inbox = inbox
        self._counted = [0.0, 0.0]
        self._divided: dict[tuple[str, Quality], float] = {}
        """Joules since the agent's start; gap_s also counts from then."""
        self._divided_gap_s = 0.0
        self._config = config
        self._node = node
        self._gpus = gpus
        self._launcher = launcher
        self._store = store
        self._powercap = Powercap(config.energy.powercap, lambda: clock().boot_s)
        self.command = PowerCommand(config.energy.power_cmd)
        self._hwmon = Hwmon(config.energy.hwmon)
        self._counters, self._platform = PowercapCounters(), PowercapCounters(is_platform=True)
        self._model = PowerModel("node")
        self._sources: tuple[PowerSource, ...] = (self.command, self._hwmon, self._counters, self._model)
        self._active: PowerSource = self._model
        self._integrals: dict[str, accounting.Integral] = {}
        self._last_read_s: dict[str, float] = {}
        self._drift = accounting.Drift()
        self.is_stale = False
        self._checkpoint = self._restored()
        self._sampled_s = self._checkpoint.at_s
        self._samples = 0
        self._joules, self._gap_s = self._checkpoint.joules, self._checkpoint.gap_s
        self._used_sources: dict[PowerSource, None] = {}
        self._cards: dict[str, accounting.DomainEnergy] = {}
        self._bucket: accounting.Totals | None = None
        self.watts: float | None = None
        self.quality = Quality.ESTIMATED

    def _slept_s(self) -> float:
        """Seconds for which this machine has been suspended since its boot."""
        return time.clock_gettime(time.CLOCK_BOOTTIME) - time.monotonic()

    def _restored(self) -> EnergyCheckpoint:
        """The counters that the previous agent stored; after a boot of the machine, only those that are still valid."""
        checkpoint, boot = self._store.checkpoint(), machine_boot_id()
        if checkpoint.boot != boot:
            return EnergyCheckpoint(boot, self._now().boot_s, self._slept_s(), -1.0, -1.0, idle=checkpoint.idle)
        self._counters.counters = checkpoint.counters
        if checkpoint.counters:  # the counters continue across a restart of the agent
            self._counters.known_s = self._now().boot_s
        self.command.goes_on_from(checkpoint.at_s)
        self._hwmon.goes_on_from(checkpoint.at_s)
        return checkpoint

    @property
    def curve(self) -> PowerCurve:
        profile = self._node.state.profile
        return profile.power or estimated_curve(round(profile.cpus))

    # -- samples -------------------------------------------------------------------------------------------------------

    async def sample(self, machine_s: float, own_s: float) -> None:
        """Take a sample. machine_s: processor seconds of all cores so far; own_s: of those that this node may use."""
        if self._checkpoint.machine_s < 0:
            self._checkpoint.machine_s, self._checkpoint.own_s = machine_s, own_s
            self._checkpoint.at_s = self._sampled_s = self._now().boot_s  # the first sample opens the accounts
        elif not self._samples:
            # own_s counts from the start of this agent; any process may have used these cores before.
            self._checkpoint.own_s = own_s - max(machine_s - self._checkpoint.machine_s, 0.0)
        self._samples += 1
        keys = list(self._node.ledger.running)
        every = SCAN_EVERY if self._launcher.units == "bare" else 1
        is_due = self._samples % max(every, -(-len(keys) // TASKS_PER_SAMPLE)) == 0
        cpu_s, readings = await self._launchers(keys if is_due else [])
        readings = self._powercap.read() if readings is None else readings
        at_s = self._now().boot_s
        passed_s, self._sampled_s = at_s - self._sampled_s, at_s
        await self._hwmon.refresh(at_s)
        busy = max(own_s - self._checkpoint.own_s, 0.0) / max(at_s - self._checkpoint.at_s, 1e-3)
        self._take_host(at_s, passed_s, readings, busy)
        self._take_cards(at_s, passed_s)
        may_catch_up = (
            self._active is self._counters and self._counters.known_s < at_s
        )  # a gap that the counters bridge is one window
        if is_due and cpu_s is not None and not may_catch_up:
            self._close_window(at_s, machine_s, own_s, cpu_s)
        if self._samples % KEPT_EVERY == 0:
            await self._keep()

    async def _launchers(self, keys: list[str]) -> tuple[dict[str, float] | None, list[Reading] | None]:
        """Processor seconds of these attempts (None: the launcher does not answer), and energy counters where it reads them."""
        found: dict[str, float] = {}
        is_root = self._config.mode == "system"
        readings: list[Reading] | None = None
        for first in range(0, len(keys) or is_root, USAGE_KEYS_MAX):
            counters = is_root and not first
            usage = await self._launcher.usage(keys[first : first + USAGE_KEYS_MAX], brief=True, counters=counters)
            if usage is None:
                return None, readings
            found |= {key: used.cpu_s for key, used in usage.of.items() if used.cpu_s >= 0}
            if counters:
                readings = [(path, name, *rest) for path, name, *rest in usage.counters]  # type: ignore[misc]
        return found, readings

    def _take_host(self, at_s: float, passed_s: float, readings: list[Reading], busy: float) -> None:
        """Add the measurement of the best working sensor. The consumption during a suspension is unknown."""
        before_s, self._checkpoint.slept_s = self._checkpoint.slept_s, self._slept_s()
        slept_s = self._checkpoint.slept_s - before_s
        if slept_s < SLEPT_S_MIN:
            slept_s = 0.0
        else:  # the counters may have restarted
            self._counters.counters, self._platform.counters = {}, {}
        deltas = {
            self.command: self.command.take(at_s),
            self._hwmon: self._hwmon.take(at_s),
            self._counters: self._counters.take(at_s, readings),
        }
        self._platform.take(at_s, readings)
        model_w = self.curve.watts_at(busy)
        self._model.add_reading(at_s, model_w * passed_s, passed_s)
        before, self._active = self._active, next(one for one in self._sources if one.is_alive(at_s))
        if self._active in deltas:
            joules, gap_s = deltas[self._active]
        else:
            joules, gap_s = model_w * max(passed_s - slept_s, 0.0), slept_s
        if slept_s and self._active is self._counters:
            gap_s = passed_s
        if before is not self._active:
            gap_s = max(gap_s, 0.0 if joules else passed_s)  # the new source counts from here on
            if not before.is_alive(at_s):
                log.warning(
                    "power sensor is silent: source=%s reason=%s now=%s", before.name, before.why, self._active.name
                )
                if before is self._counters:  # meanwhile, a reading of power was in use
                    gap_s += max(at_s - passed_s - before.known_s, 0.0)
        self._counted = [self._counted[0] + joules, self._counted[1] + gap_s]
        self._joules += joules
        self._gap_s += gap_s
        self._used_sources[self._active] = None
        if self._active.watts is not None:
            self.watts, self.quality = self._active.watts, self._active.quality

    def _take_cards(self, at_s: float, passed_s: float) -> None:
        """Add the energy of the GPUs, and the attempts that held them. A slice gets a share of the whole card's energy."""
        holders: dict[str, dict[str, None]] = {}
        chips = self._hwmon.cards.power
        places = {
            device.id: device.bdf or (device.name if device.name in chips else device.id)
            for device in self._gpus.devices
        }
        for key, names in self._node.ledger.devices.holding.items():
            for name in names:
                holders.setdefault(places.get(name, name), {})[key] = None
        cards_w = 0.0
        for place, (read_s, reading) in (chips | self._gpus.power).items():
            counted = self._card_counted(place, read_s, reading, at_s)
            if counted is None:
                continue
            delta, quality = counted
            held = holders.get(place, {})
            idle = self._checkpoint.idle.setdefault(place, accounting.IdlePower())
            watts = _watts_of(read_s, reading, at_s)
            if not held and not reading.foreign and watts is not None:
                idle.take(watts, 0.0, 1.0)
            cards_w += watts or 0.0
            before = self._cards.get(place) or accounting.DomainEnergy(
                "gpu", self._source_of(place), quality, 0.0, 0.0, 0.0, {}, 0.0
            )
            self._cards[place] = before._replace(
                quality=Quality.worst((before.quality, quality)),
                joules=before.joules + delta.joules,
                gap_s=before.gap_s + delta.gap_s,
                idle_w=idle.watts,
                used={**before.used, **{key: before.used.get(key, 0.0) + passed_s / len(held) for key in held}},
                busy=before.busy + (passed_s if held or reading.foreign else 0.0),
            )
        if self._active.watts is not None and self._active.scope != "node":
            self.watts = self._active.watts + cards_w

    def _source_of(self, place: str) -> str:
        return "nvml" if place in self._gpus.power else "hwmon"

    def _card_counted(
        self, place: str, read_s: float, reading: DeviceReading, at_s: float
    ) -> tuple[accounting.EnergyDelta, Quality] | None:
        """Joules of a card since the last sample; None if it was never measured."""
        if reading.energy_j is None and (reading.power_w is not None or place in self._integrals):
            integral = self._integrals.setdefault(place, accounting.Integral())
            if reading.power_w is not None:
                integral.read(read_s, reading.power_w)
            return integral.take(at_s), Quality.DERIVED
        if reading.energy_j is None and place not in self._last_read_s:
            return None
        delta = accounting.EnergyDelta()
        if reading.energy_j is not None:
            self._integrals.pop(place, None)
            delta = self._checkpoint.cards.setdefault(place, accounting.Counter()).take(read_s, reading.energy_j)
            self._last_read_s[place] = max(read_s, self._last_read_s.get(place, read_s))
        if at_s - self._last_read_s[place] > CARD_SILENT_S:  # its next reading starts a new count
            delta = accounting.EnergyDelta(gap_s=at_s - self._last_read_s[place])
            self._last_read_s[place] = at_s
            self._checkpoint.cards.pop(place, None)
        return delta, Quality.MEASURED

    def _close_window(self, at_s: float, machine_s: float, own_s: float, cpu_s: Mapping[str, float]) -> None:
        checkpoint = self._checkpoint
        seconds = at_s - checkpoint.at_s
        if seconds <= 0:
            return
        sources = tuple(self._used_sources)
        is_model = self._model in sources
        busy_s = max(own_s - checkpoint.own_s if is_model else machine_s - checkpoint.machine_s, 0.0)
        joules, cards_w = self._joules, 0.0
        if any(one.scope == "node" for one in sources) and not is_model:  # includes the GPUs
            joules = max(joules - sum(card.joules for card in self._cards.values()), 0.0)
            cards_w = sum(card.idle_w for card in self._cards.values())
        quality = Quality.worst(tuple(one.quality for one in sources))
        scope = "+".join(dict.fromkeys(one.scope for one in sources))
        source = "+".join(dict.fromkeys(one.name for one in sources))
        used = checkpoint.account.used_since(cpu_s)
        host = accounting.DomainEnergy(scope, source, quality, joules, self._gap_s, 0.0, used, busy_s)
        host = host._replace(
            idle_w=self._idle_watts(joules, host.known_s(seconds), busy_s / seconds, cards_w, is_model=is_model)
        )
        totals = checkpoint.account.window(
            at_s, self._now().wall_s, seconds, (host, *self._cards.values()), self._node.ledger.running
        )
        self._joules = self._gap_s = 0.0
        parts = (("tasks", totals.tasks_joules), ("other", totals.other_joules), ("idle", totals.idle_joules))
        for name, joules in parts:
            self._divided[name, totals.quality] = self._divided.get((name, totals.quality), 0.0) + joules
        self._divided_gap_s += totals.gap_s
        self._used_sources, self._cards = {}, {}
        checkpoint.at_s, checkpoint.machine_s, checkpoint.own_s = at_s, machine_s, own_s
        if self._bucket is None:
            self._bucket = totals
        else:
            self._bucket.add(totals)

    def _idle_watts(self, joules: float, known_s: float, busy: float, cards_w: float, *, is_model: bool) -> float:
        """Power that the host would draw when idle. Notes when its measured curve is stale. cards_w: power of idle GPUs, which the
        curve of a whole machine includes."""
        curve = self.curve
        if is_model or curve.quality is not Quality.ESTIMATED:
            idle_w = max(curve.watts[0] - cards_w, 0.0)
            if is_model or known_s <= 0 or self.is_stale:
                return idle_w
            self.is_stale = self._drift.take(joules, (curve.watts_at(busy) - cards_w) * known_s, known_s)
            if self.is_stale:
                log.warning(
                    "power profile is stale: measured power drifts from it; measure again: peerload power profile"
                )
                self._inbox.put(PowerMeasured(msgspec.structs.replace(curve, quality=Quality.ESTIMATED)))
            return idle_w
        idle = self._checkpoint.idle.setdefault(self._active.scope, accounting.IdlePower())
        if known_s > 0 and joules > 0:
            share = min(busy / (os.cpu_count() or 1), 1.0)
            typical = curve.watts_at(share * curve.threads)
            idle.take(joules / known_s, share, curve.watts[0] / typical if typical else 1.0)
        return idle.watts

    # -- ends of attempts ----------------------------------------------------------------------------------------------

    def ended(self, key: str, exit_: Exit) -> Exit:
        """The exit of an attempt with its joules, as far as known."""
        if not 0 < exit_.started_at < exit_.ended_at:
            return exit_
        account, usage, rate_else = self._checkpoint.account, exit_.usage, 0.0
        if account.rate is None:
            curve = self.curve
            rate_else = curve.watts_at(1.0) - curve.watts[0]
        cards = [card for card in self._cards.values() if key in card.used]
        counted_s = self._sampled_s - self._checkpoint.at_s
        cpu_s, now = usage.user_s + usage.system_s, self._now()
        slept_s = max(self._slept_s() - self._checkpoint.slept_s, 0.0)
        ended_s = now.boot_s - slept_s - max(now.wall_s - exit_.ended_at, 0.0)
        task = account.finish(key, cpu_s, ended_s, rate_else, cards, counted_s)
        if task is None:
            return exit_
        with_energy = {"joules": round(task.joules, 3), "energy_quality": task.quality, "energy_scope": task.scope}
        return msgspec.structs.replace(exit_, usage=msgspec.structs.replace(usage, **with_energy))

    def so_far(self, key: str) -> float | None:
        """Joules of a running attempt until the last window; None if there was none."""
        task = self._checkpoint.account.tasks.get(key)
        return task.joules if task is not None and task.is_known else None

    # -- what is kept and shown ----------------------------------------------------------------------------------------

    async def _keep(self) -> None:
        checkpoint = self._checkpoint
        checkpoint.counters, checkpoint.joules, checkpoint.gap_s = self._counters.counters, self._joules, self._gap_s
        totals, keep_since = self._bucket, 0.0
        if self._samples % PRUNED_EVERY == 0:
            keep_since = self._now().wall_s - self._config.ended_kept_s
        try:
            await asyncio.to_thread(self._store.write, msgspec.json.encode(checkpoint), totals, keep_since)
        except sqlite3.Error as error:
            log.warning("energy accounts cannot be kept: error=%s", error)
        else:
            if totals is not None and totals.until - totals.since >= accounting.BUCKET_S:
                self._bucket = None

    async def close(self) -> None:
        await self._keep()
        self._store.close()

    def totals(self, since: float) -> dict[str, object]:
        """The answer to `energy`: energy since a time (Unix s), with the quality of its worst part. Raises StoreError."""
        newest = self._bucket
        try:
            found = self._store.totals(since, -1.0 if newest is None else newest.since)
        except (sqlite3.Error, msgspec.ValidationError) as error:
            raise StoreError("the energy accounts cannot be read", why=str(error)) from None
        found += [newest] if newest is not None and newest.until > since else []
        total = None
        for one in found:
            if total is None:
                total = msgspec.structs.replace(one)
            else:
                total.add(one)
        answer: dict[str, Any] = {"node": self._config.node, "since": since, "until": self._now().wall_s}
        if total is None:
            names = ("joules", "wh", "tasks_joules", "other_joules", "idle_joules", "quality", "scope", "source")
            return answer | dict.fromkeys(names) | {"gap_s": None}
        answer |= {name: getattr(total, name) for name in _COLUMNS.split(", ")}
        return answer | {"wh": total.joules / accounting.JOULES_PER_WH, "quality": total.quality.value}

    @property
    def measured_watts(self) -> float | None:
        """Power as sensors read it; None if there is none."""
        return None if self._active is self._model else self.watts

    def power(self) -> dict[str, object]:
        shown = [*self._sources, self._platform] if self._platform.watts is not None else self._sources
        sources = [
            {
                "name": one.name,
                "scope": one.scope,
                "quality": one.quality.value,
                "watts": one.watts,
                "why": one.why or None,
            }
            for one in shown
        ]
        for place, (read_s, reading) in (self._hwmon.cards.power | self._gpus.power).items():
            watts = _watts_of(read_s, reading, self._sampled_s)
            quality = (Quality.MEASURED if reading.energy_j is not None else Quality.DERIVED).value
            sources.append(
                {
                    "name": f"{self._source_of(place)} {place}",
                    "scope": "gpu",
                    "quality": quality,
                    "watts": watts,
                    "why": None if watts is not None or reading.power_w is None else "it is silent",
                }
            )
        curve = self.curve
        return {
            "node": self._config.node,
            "watts": self.watts,
            "quality": self.quality.value if self.watts is not None else None,
            "scope": self._active.scope,
            "source": self._active.name,
            "sources": sources,
            "joules": self._counted[0],
            "gap_s": self._counted[1],
            "at_s": self._sampled_s,
            "levels": levels_of(os.cpu_count() or 1),
            "curve": msgspec.to_builtins(curve) | {"quality": curve.quality.value, "stale": self.is_stale},
        }

    def counters(self) -> dict[str, float]:
        joules_by_label = {
            labelled(metrics.ENERGY, of=name, quality=quality.value): joules
            for (name, quality), joules in self._divided.items()
        }
        return joules_by_label | {metrics.ENERGY_GAP: self._divided_gap_s}

    def gauges(self) -> dict[str, float]:
        """The current power; {} if it is unknown."""
        if self.watts is None:
            return {}
        return {labelled(metrics.POWER, source=self._active.name, quality=self.quality.value): self.watts}

    def take_profile(self, request: PowerProfileRequest) -> dict[str, object]:
        """Store a power profile of this machine, and send its curve to other nodes → the profile. Raises BadRequest."""
        cpu = processor()
        try:
            if request.document:
                profile = decoded(request.document, cpu)
            else:
                levels = [Level(*one) for one in request.measured]
                curve = fitted(levels, request.cores, request.threads)
                governor = read_text_of(Path(self._config.energy.cpufreq, "policy0/scaling_governor"))
                profile = PowerProfile(
                    curve, cpu, governor=governor, source=self._active.name, scope=self._active.scope
                )
                numbers, watts, sd, _ = zip(*levels, strict=True)
                profile = msgspec.structs.replace(profile, levels=numbers, watts=watts, sd=sd, date=self._now().wall_s)
        except (BadProfile, ValueError) as error:
            raise BadRequest(
                "this power profile cannot be used", why=str(error), hint="measure:  peerload power profile"
            ) from None
        try:
            store_profile(Path(self._config.state), profile)
        except OSError as error:
            raise StoreError("the power profile cannot be stored", why=str(error.strerror)) from None
        self.is_stale, self._drift = False, accounting.Drift()
        self._inbox.put(PowerMeasured(profile.curve))
        return dict(msgspec.to_builtins(profile))


def _watts_of(read_s: float, reading: DeviceReading, at_s: float) -> float | None:
    return reading.power_w if at_s - read_s <= CARD_SILENT_S else None
