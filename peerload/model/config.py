"""Every setting of the core and of the agent, with its bound and its default.

A value that cannot be used raises `ConfigError` naming the key. The agent reads these from flags, `PEERLOAD_*`
variables and TOML files (`config/loader.py`); the simulator makes them directly.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
from msgspec import Meta

from peerload.model.gossip import LAN, GossipPreset
from peerload.model.resources import Kind, Name, NodeName, Speed

if TYPE_CHECKING:
    from peerload.model.resources import PowerCurve

Positive = Annotated[float, Meta(gt=0.0, le=1e9)]
Limit = Annotated[int, Meta(ge=1, le=100_000_000)]


class GpuConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sharing of the GPUs of one node (docs/devices.md)."""

    tasks_max: Annotated[int, Meta(ge=1, le=48)] = 10
    """Limit on the tasks on one GPU, foreign ones included."""
    memory_share_max: Annotated[float, Meta(gt=0.0, le=1.0)] = 0.90
    """Largest share of a GPU's memory that is promised to tasks, less the reserve."""
    reserve_bytes: Annotated[int, Meta(ge=0, le=1 << 50)] = 512 << 20
    """Memory of a GPU reserved for its driver and the contexts of its tasks."""
    activity_max: Annotated[float, Meta(gt=0.0, le=48.0)] = 48.0
    """Limit on the work, in whole GPUs, on a GPU shared by time. Tasks slow each other down above 1, and fill each
    other's pauses. A task counts for its fraction, or for ``activity_unknown``. 48 is no limit, given ``tasks_max``."""
    activity_unknown: Annotated[float, Meta(gt=0.0, le=1.0)] = 0.5
    """The assumed work of a task without any known figures."""
    settle_s: Annotated[float, Meta(ge=0.0, le=3600.0)] = 5.0
    """Time in s in which no other task joins a task of unknown need on a GPU, unless its memory is stable before."""
    starve_after_s: Annotated[float, Meta(gt=0.0, le=1e9)] = 900.0
    """Time in s after which a waiting task is no longer overtaken."""
    mps: Literal["off", "auto", "require"] = "off"
    """Sharing by MPS: off; for tasks that ask for it or would share a GPU anyway; or as the only kind of sharing."""
    pct_oversubscribe: Annotated[float, Meta(ge=1.0, le=48.0)] = 2.0
    """Bound on the shares of multiprocessors promised to tasks under MPS, in whole GPUs."""
    mps_by_user: bool = False
    """True if tasks of different users run as different users, who cannot share an MPS daemon."""
    mps_users: str | dict[str, str] = "guest"
    """The setting `users`: the accounts of tasks of users of other nodes."""
    release_s_max: Annotated[float, Meta(gt=0.0, le=3600.0)] = 5.0
    """An ended task's GPU is free when its processes are gone from it; remains after this time count as foreign."""


class CoreConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Settings on which the decisions of one node depend.

    Leases (docs/wire.md): an executor freezes a task at ``ts + lease_s`` on its own clock, the home waits
    ``lease_grace_s`` longer; a larger lease rides out longer outages and makes the loss of a node cost more time.
    """

    # leases and handoff
    lease_s: Positive = 60.0
    lease_grace_s: Positive = 5.0
    reservation_s: Positive = 10.0
    """Time that a reservation waits for its COMMIT."""
    offer_timeout_s: Positive = 5.0
    """An OFFER without an answer counts as declined after this."""
    repeat_s: Positive = 1.0
    """First pause before COMMIT or RESULT is repeated; it doubles up to repeat_s_max."""
    repeat_s_max: Positive = 15.0

    lease_auto_s_max: Positive = 2400.0
    """Maximum of a lease that grows with the run time of its task (a tenth of it)."""
    frozen_s_max: Positive = 86_400.0
    """Time in s after which a frozen task, whose lease has run out, is ended."""
    frozen_kept_s: Positive = 60.0
    """Time in s that a frozen task is kept if a task of this node needs its resources."""
    failure_backoff_s: Positive = 1.0
    """Pause before a failed task with retries starts again; it doubles each time, up to failure_backoff_s_max."""
    failure_backoff_s_max: Positive = 60.0
    await_s: Positive = 10.0
    """Interval of queries to another home about tasks that tasks here depend on."""
    await_answer_s: Positive = 5.0
    """Time that another home has to confirm that a task exists, when a task that depends on it is submitted."""
    groups_max: Limit = 1000
    """Limit on groups with settings."""
    inquiries_max: Limit = 1000
    """Limit on submissions that wait for the state of the tasks that they depend on."""
    unknown_ask_s_max: Positive = 300.0
    """Longest interval of queries to a node about the lost run of a task with `--once`."""

    # searching
    probe_timeout_s: Positive = 0.25
    """A probe without a reply counts as "does not accept" after this."""
    inbound_s: Positive = 2.0
    """A promised task counts as load for this long while it is on its way."""
    answer_backoff_s: Positive = 0.03
    """Longest random pause of a useful node before it answers a broadcast: more saves answers and costs time."""
    answer_wait_s: Positive = 0.25
    """Time after which a broadcast search ends, if no node that accepts has answered."""
    answers_enough: Limit = 3
    """Answers after which a node that asks for load sends `Enough`."""
    answers_pending_max: Limit = 1024
    """Limit on requests of others that this node is about to answer."""
    searches_in_flight_max: Limit = 8
    """Limit on concurrent sender searches; later arrivals wait for their turn."""
    probes_per_search_max: Limit = 64
    stranded_backoff_s: Positive = 0.5
    """First pause, in s, before other nodes are asked again for a task that its home cannot run now; it doubles up to
    ``stranded_backoff_s_max``."""
    full_s_min: Positive = 0.02
    """First pause, in s, before a node without room for a task that its home cannot run is asked again; it doubles
    each time."""
    full_s_max: Positive = 2.0
    """Longest such pause, in s; it ends early if the node reports room or ends a task of this home."""
    full_kept_max: Limit = 4096
    stranded_backoff_s_max: Positive = 15.0
    decline_memory_s: Positive = 60.0
    """A decline for a lasting reason is remembered per node and reason for this long."""
    declines_remembered_max: Limit = 4096
    retry_s_min: Positive = 0.25
    """A receiver-side retry timer never waits less than this, however short tasks are."""
    retry_s_max: Positive = 2.0
    """A receiver-side retry timer never waits longer than this, however long tasks take."""

    # starting
    ahead_s: Annotated[float, Meta(ge=0.0, le=60.0)] = 0.0
    """Expected work that may wait at the launcher behind an attempt (`core/coordination/runs.py`); 0 = none."""
    ahead_max: Limit = 16
    """Attempts that may wait there behind one."""

    # load
    counts_foreign: bool = True
    """True if cores that other programs keep busy occupy slots (`core/resources/admission.py`)."""
    settle_s: Annotated[float, Meta(ge=0.0, le=3600.0)] = 0.2
    """A load region counts only after it has held for this long."""
    tell_s_min: Annotated[float, Meta(ge=0.0, le=3600.0)] = 0.05
    """Shortest interval, in s, between load reports that are sent at every change."""
    report_age_s_max: Positive = 90.0
    """Age in s from which a report is ignored."""

    # membership
    gossip: GossipPreset = LAN
    """Speed at which the loss of a node is noticed, and its cost (docs/membership.md)."""
    peers_max: Limit = 1000
    reports_kept_max: Limit = 1000
    """Limit on stored reports of peers; one more drops the oldest arrival."""

    # bounds
    guests_max: Limit = 10_000
    """Limit on tasks of other homes on this node, waiting or running."""
    tasks_queued_max: Limit = 1_000_000
    migrations_max: Limit = 1000
    """Limit on placements of one task by choice, if its migration policy sets none; the largest that an offer can
    hold."""
    attempts_max: Limit = 5
    """Attempts that may end in the loss of their node before a task is failed."""
    poison_nodes: Limit = 2
    """Lost nodes after which a task that ran on each of them is held, until a user releases it."""
    loss_backoff_s: Positive = 1.0
    """Pause before a task whose attempt was lost starts again; it doubles with each loss up to loss_backoff_s_max."""
    loss_backoff_s_max: Positive = 60.0
    floor_kept_s: Positive = 3600.0
    """Time that an unused attempt fence is kept; no message is that late."""
    floors_kept_max: Limit = 100_000
    """Limit on attempt fences. Those of tasks with `--once` whose home has not confirmed them are kept in addition."""
    refusals_max: Limit = 5
    """Circuit breaker: offers in a row that a node may refuse or leave unanswered, although it advertises room, before it is
    skipped."""
    fast_failures_max: Limit = 10
    """Tasks in a row that may fail on a node within fast_failure_s each, before it is skipped."""
    fast_failure_s: Positive = 2.0
    skip_s: Positive = 60.0
    """Time in s for which the circuit breaker skips a node."""
    kill_after_s: Positive = 10.0
    """A revoked or timed-out task gets its signal, then SIGKILL after this."""
    attended_s: Positive = 30.0
    """Time after an agent's restart for the client of an attended task to return, before the task is cancelled."""
    members_at_a_time: Limit = 250
    """Members of an array in submission that are stored together before other requests have their turn."""
    uniform_array_min: Limit = 100
    """Smallest array whose untouched members are one object in memory, and one row until they are stored."""
    uniform_at_a_time: Limit = 2500
    """Untouched members that are stored, or cancelled, before other requests have their turn."""
    environments_kept_max: Limit = 64
    """Limit on distinct environments that tasks share in memory."""
    tokens_kept_max: Limit = 100_000
    durations_kept_max: Limit = 50
    """Runs of a command, and of all commands together, from which durations are learned."""
    commands_kept_max: Limit = 4096
    """Commands (at each level at which one is known) whose durations are remembered."""

    # devices
    gpu: GpuConfig = GpuConfig()

    # energy
    cap_w: Annotated[float, Meta(ge=0.0, le=1e6)] | None = None
    """Power cap of this node, which replaces that of its curve; 0: none."""
    may_sleep: bool = False
    """True if this machine is suspended when it is idle."""

    def limited(self, power: PowerCurve) -> PowerCurve:
        """The curve with the settings of this node: its power cap, and whether it may sleep."""
        cap_w = power.cap_w if self.cap_w is None else self.cap_w
        return msgspec.structs.replace(power, cap_w=cap_w, may_sleep=power.may_sleep or self.may_sleep)


class GpuSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The table `[gpu]` of the config file. mem_threshold, reserve: at most this share of a card's memory, less the
    reserve, is promised to tasks; max_activity: limit on the work on one card, in whole GPUs (a task counts for its
    fraction, otherwise for half); exclude: cards not to use: numbers, or beginnings of their names; mps: whether tasks
    share cards by MPS ("require": only by MPS); pct_oversubscribe: limit on the multiprocessors promised under MPS, in
    whole cards."""

    max_tasks: Annotated[int, Meta(ge=1, le=48)] = GpuConfig().tasks_max
    max_activity: Annotated[float, Meta(gt=0.0, le=48.0)] = GpuConfig().activity_max
    mem_threshold: Annotated[float, Meta(gt=0.0, le=1.0)] = GpuConfig().memory_share_max
    reserve: str = "512MiB"
    settle_s: Annotated[float, Meta(ge=0.0, le=3600.0)] = GpuConfig().settle_s
    starve_after: str = "15m"
    exclude: Annotated[tuple[str | int, ...], Meta(max_length=64)] = ()
    mps: Literal["auto", "off", "require"] = "auto"
    pct_oversubscribe: Annotated[float, Meta(ge=1.0, le=48.0)] = GpuConfig().pct_oversubscribe


class LoadSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The table `[load]` of the config file. foreign: whether cores that other programs keep busy occupy slots of this node
    ("count") or are only displayed ("ignore")."""

    foreign: Literal["count", "ignore"] = "count"


class FilesSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The table `[files]` of the config file. cache: limit on the stored files of tasks on this node. snapshot: the
    working directory of a task submitted here travels if it is not the same on all nodes that could run the task
    ("auto"), or only if its user asks for that ("asked"). build_s_max: limit on the time to build an environment."""

    cache: Annotated[str, Meta(max_length=20)] = "10GiB"
    snapshot: Literal["asked", "auto"] = "asked"
    build_s_max: Annotated[float, Meta(ge=1.0, le=86_400.0)] = 1800.0


class CpusSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The table `[cpus]` of the config file. enforce: if processors are scarce, tasks get shares in proportion to their
    requests ("share"), and never more than they ask for ("limit"), as far as the launcher has cgroups."""

    enforce: Literal["off", "share", "limit"] = "off"


class EnergySettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The table `[energy]` of the config file. power_cmd: a command that prints the power of this machine in watts;
    powercap, hwmon, cpufreq: directories of the kernel, which differ in containers. cap_w: limit on the node's power,
    by its power curve, for the placement of tasks; 0: none.
    price_file: prices of energy, or its carbon, over time (`energy/price.py`). gpu_power_w, gpu_clock_mhz, cpu_governor,
    cpu_max_mhz: controls in force while the agent runs, 0 and "": off (`agent/energy.py`). sleep_after: this machine is
    suspended by suspend_cmd after this time without tasks, "": never; resume_cmd: wakes another one, whose node is in
    PEERLOAD_NODE, "": a magic packet does (`agent/energy.py`)."""

    power_cmd: Annotated[str, Meta(max_length=4096)] = ""
    powercap: Annotated[str, Meta(max_length=4096)] = "/sys/class/powercap"
    hwmon: Annotated[str, Meta(max_length=4096)] = "/sys/class/hwmon"
    cpufreq: Annotated[str, Meta(max_length=4096)] = "/sys/devices/system/cpu/cpufreq"
    cap_w: Annotated[float, Meta(ge=0.0, le=1e6)] = 0.0
    price_file: Annotated[str, Meta(max_length=4096)] = ""
    gpu_power_w: Annotated[float, Meta(ge=0.0, le=1e5)] = 0.0
    gpu_clock_mhz: Annotated[int, Meta(ge=0, le=100_000)] = 0
    cpu_governor: Annotated[str, Meta(pattern=r"^[a-z_]{0,32}\Z")] = ""
    cpu_max_mhz: Annotated[int, Meta(ge=0, le=100_000)] = 0
    sleep_after: Annotated[str, Meta(max_length=20)] = ""
    suspend_cmd: Annotated[str, Meta(max_length=4096)] = ""
    resume_cmd: Annotated[str, Meta(max_length=4096)] = ""


Targets = Annotated[tuple[Annotated[str, Meta(min_length=1, max_length=4096)], ...], Meta(max_length=8)]


class HooksSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The table `[hooks]` of the config file: targets of notifications when a task of this node has ended or failed, or
    a node is dead: commands, URLs, ntfy:TOPIC, mail:ADDRESS. secret_file: signs webhooks; sendmail: the program for
    mail."""

    on_end: Targets = ()
    on_fail: Targets = ()
    on_node_dead: Targets = ()
    secret_file: Annotated[str, Meta(max_length=4096)] = ""
    sendmail: Annotated[str, Meta(max_length=4096)] = ""

    def targets(self) -> tuple[str, ...]:
        return (*self.on_end, *self.on_fail, *self.on_node_dead)


class WebSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The table `[web]` of the config file: the agent runs `peerload web` with these flags. listen: "": it does not."""

    listen: Annotated[str, Meta(max_length=4096)] = ""
    host: Annotated[tuple[Annotated[str, Meta(min_length=1, max_length=255)], ...], Meta(max_length=16)] = ()
    tls_cert: Annotated[str, Meta(max_length=4096)] = ""
    tls_key: Annotated[str, Meta(max_length=4096)] = ""


class DeviceConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A `[[device]]` of the config file: the devices of one kind. env: variables for tasks that get some of them;
    ``{ids}`` in a value stands for their ids."""

    kind: Kind
    ids: Annotated[
        tuple[Annotated[str, Meta(pattern=r"^[A-Za-z0-9._:/@+-]{1,80}\Z")], ...], Meta(min_length=1, max_length=64)
    ]
    env: dict[
        Annotated[str, Meta(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,127}\Z")], Annotated[str, Meta(max_length=4096)]
    ] = {}


AccountName = Annotated[str, Meta(pattern=r"^[^\x00-\x20/:,\x7f-\x9f]{1,64}\Z")]
"""The name of an account, or of a group, of the machine: never one with a colon in it."""
UserOf = Annotated[str, Meta(pattern=r"^[a-z0-9-]{1,40}:[^\x00-\x20/:,\x7f-\x9f]{1,64}\Z")]


class AgentConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings of one agent; each is a flag of `peerload agent` and a key of the config file."""

    node: NodeName
    state: str
    socket: str
    listen: str = "127.0.0.1:0"
    advertise: str = ""
    """Address that others dial, if it differs from this node's own: a port that a gateway forwards to it."""
    peer: Annotated[tuple[str, ...], Meta(max_length=64)] = ()
    mqtt: Annotated[tuple[str, ...], Meta(max_length=16)] = ()
    mqtt_ca: str = ""
    """CA for brokers at mqtts://: a file, or `system` for those of the system; "": the cluster's own."""
    mqtt_password_file: str = ""
    """A file with one line `USER:PASSWORD`, readable only by its owner, for brokers whose address has no password."""
    slots: Annotated[int, Meta(ge=0, le=65536)] | None = None
    policy: str = "adaptive"
    label: Annotated[tuple[Name, ...], Meta(max_length=64)] = ()
    speed: Speed | None = None
    """Speed of the node relative to the reference machine; None: measured once, kept in the state directory."""
    cluster: str = ""
    """The cluster's directory (`peerload cluster init` makes one); "": this user's, else one of this machine alone."""
    certificate_s: Annotated[float, Meta(ge=1.0, le=3.2e8)] = 90 * 86_400.0
    """Lifetime of the certificates that this node makes; after two thirds of it they are renewed."""
    gossip: Literal["local", "lan", "wan"] = "lan"
    """Preset for how fast the loss of a node is noticed: agents on one machine, on one network, or far apart."""
    output_bytes_max: Annotated[int, Meta(ge=4096, le=1 << 50)] = 16 << 20
    """Bytes captured of each stream of a task: half from the head and half from the tail."""
    ended_kept_s: Annotated[float, Meta(gt=0.0, le=1e9)] = 30 * 86_400.0
    """Time in s that ended tasks, their outputs and events are kept."""
    ended_tasks_max: Limit = 100_000
    """Ended tasks kept at most."""
    ended_output_bytes_max: Annotated[int, Meta(ge=0, le=1 << 60)] = 5 << 30
    """Bytes of outputs of ended tasks kept at most: the oldest are removed first."""
    ended_submissions_kept: Annotated[int, Meta(ge=1, le=1_000_000)] = 1000
    """Number of submissions that share the space for ended tasks: the largest submissions are pruned first, none below
    its share."""
    retention_every_s: Annotated[float, Meta(ge=0.05, le=86_400.0)] = 60.0
    """Interval of retention runs, also before the first one after the agent's start."""
    lease_s: Annotated[float, Meta(ge=1.0, le=86_400.0)] = 60.0
    """Longest silence of a node that runs a task for another; after it the task is frozen there and, a little later,
    run elsewhere. More tolerates longer outages, less detects a lost node sooner."""
    mqtt_state_every_s: Positive = 30.0
    """Interval at which own retained state is published again, because a broker's memory is not durable."""
    mqtt_publish_state: bool = False
    """Publish the state of this node and its tasks at the broker for other systems, for all who may read there."""
    record: str = ""
    """A file in which every event and decision is recorded, for `peerload replay`; "" = none."""
    gpu: GpuSettings = GpuSettings()
    """Sharing of the GPUs of this node: a table of the config file."""
    load: LoadSettings = LoadSettings()
    """Load of this node: a table of the config file."""
    cpus: CpusSettings = CpusSettings()
    """Cores of tasks: a table of the config file."""
    energy: EnergySettings = EnergySettings()
    """Sensors of power: a table of the config file."""
    files: FilesSettings = FilesSettings()
    """Files that travel with tasks: a table of the config file."""
    hooks: HooksSettings = HooksSettings()
    """Targets of notifications about ended tasks and lost nodes: a table of the config file."""
    web: WebSettings = WebSettings()
    """The web server that the agent runs: a table of the config file."""
    device: Annotated[tuple[DeviceConfig, ...], Meta(max_length=16)] = ()
    """Other devices that tasks may ask for by number: tables of the config file."""
    gpu_claims: str = ""
    """Directory in which agents of this machine claim its GPUs, the same for all of them; "": the first of
    /run/lock, /var/lock, /run/lock/peerload and /tmp that all users may write to."""
    inbox_max: Limit = 200_000
    clients_max: Limit = 256
    mode: Literal["user", "system"] = "user"
    """Mode of the agent: "user": for the user that it runs as, no other has access; "system": for all users of this
    machine that its groups admit, each with separate tasks. Only set on the command line."""
    group: AccountName = "peerload"
    """Group of the machine whose members may use the agent (system mode)."""
    admin_group: AccountName = "peerload-admin"
    """Group whose members may also change what belongs to others, as root may (system mode)."""
    users: Literal["guest", "same-name"] | Annotated[dict[UserOf, AccountName], Meta(max_length=4096)] = "guest"
    """Account of users of other nodes (system mode): "guest", an unprivileged uid; "same-name", the account with the same name;
    or a table from ``node:user`` to an account."""
    map_administrators: bool = False
    """True if users of other nodes may be mapped to members of the admin group (system mode), whose tasks can request
    anything from this agent that an administrator may."""
    allow_root_tasks: bool = False
    """True if root may submit tasks (system mode)."""
    accept_foreign: bool = True
    """True if this node runs tasks of other nodes (system mode)."""
    exec_allow: Annotated[
        tuple[Annotated[str, Meta(pattern=r"^/[^\x00]*\Z", max_length=4096)], ...], Meta(max_length=1024)
    ] = ()
    """Allowed programs of tasks of other nodes, such as "/usr/bin/*" (system mode); (): any."""
    guest_uids: tuple[
        Annotated[int, Meta(ge=1000, lt=(1 << 32) - 1)], Annotated[int, Meta(ge=1000, lt=(1 << 32) - 1)]
    ] = (61_184, 65_519)
    """Least and greatest uid for guests (system mode); each task has a separate one."""
    guest_bytes_max: Annotated[int, Meta(ge=1 << 20, le=1 << 50)] = 1 << 30
    """Bytes that a guest may have in its temporary files, which are kept in memory (system mode)."""
    guest_memory_bytes_max: Annotated[int, Meta(ge=0, le=1 << 50)] = 0
    """Memory of a guest that has not requested any (system mode); 0: its share of the machine's memory, in proportion
    to its requested processors."""
    guest_network: bool = True
    """True if guests have the network of the machine, else only a separate loopback interface (system mode)."""
    task_processes_max: Annotated[int, Meta(ge=1, le=1 << 22)] = 512
    """Processes and threads of one task at a time (system mode)."""
    launcher: str = "/run/peerload-launcher"
    """Directory of the sockets of the launcher, which a separate service runs as root (system mode)."""
    user_connections_max: Limit = 64
    """Connections of one user at a time (system mode)."""
    user_requests_per_s: Annotated[float, Meta(ge=1.0, le=1e6)] = 5_000.0
    """Requests of one user in a second (system mode)."""
    user_submits_per_s: Annotated[float, Meta(ge=1.0, le=1e6)] = 20_000.0
    """Tasks that one user submits in a second (system mode)."""
    user_tasks_max: Limit = 1_000_000
    """Unfinished tasks of one user (system mode)."""
    user_output_bytes_max: Annotated[int, Meta(ge=0, le=1 << 60)] = 10 << 30
    """Bytes kept of the outputs of one user; beyond it nothing is queued (system mode)."""
