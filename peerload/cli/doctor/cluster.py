"""Checks of `doctor` between nodes: the cluster directory, addresses, datagrams, names, clocks; and MQTT brokers. Each broker is
probed with a separate client for its version and for whether it accepts this node, or everybody."""

from __future__ import annotations

import ipaddress
import os
import re
import secrets
import shlex
import threading
from pathlib import Path
from typing import NamedTuple

from peerload.cli.doctor.machine import FAIL, OK, SKIP, WARN, DoctorInput, Finding, needs_agent
from peerload.distribution import deployed
from peerload.text.format import counted, duration_text, shortened

TYPE_CHECKING = False

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    import paho.mqtt.client as mqtt

    from peerload.security.broker import BrokerTls, BrokerUrl


REJOIN = "on a node with the CA's key:  peerload invite        then here:  peerload join TOKEN"
NO_ISSUER = "start the machine that has it again; if it is lost, make a new cluster:  docs/security.md"
PEERS_FOR_SECOND_ISSUER = 2
"""Number of peers from which on doctor reports that only one node can invite."""
EXPIRES_WITHIN_S = 30 * 86_400.0
DATAGRAM_AGE_S_MAX = 120.0
"""UDP counts as blocked if no peer has sent a datagram for this time."""
ROUNDS_S = 12.0
"""Time per member after which a node has certainly probed all members: two rounds, one probe every 3 s (`gossip = "wan"`)."""
MET_S_MIN = 30.0
"""A more recently connected peer may not have sent a datagram yet."""
CLOCK_S_GOOD, CLOCK_S_MAX = 2.0, 60.0
NAMED_MAX = 4
TCP_LISTENS = "0A"
"""The state code of a listening socket in /proc/net/tcp."""


def cluster(facts: DoctorInput) -> Finding:
    """Check that the cluster directory is usable, will stay so, and is the one that the agent uses."""
    if facts.cluster_error is not None:
        return Finding(FAIL, str(facts.cluster_error), facts.cluster_error.hint or "peerload cluster show")
    if facts.checkup.get("revoked"):
        return Finding(FAIL, "this node was revoked by the cluster", REJOIN)
    found = facts.cluster
    if found is None:
        if not facts.info.get("cluster_directory") or facts.info.get("cluster_local"):
            return Finding(OK, "none yet: only agents of this user on this machine meet")
        used = f"{facts.info.get('cluster')} in {facts.info['cluster_directory']}"
        return _certificate(facts) or Finding(OK, f"{used}, which the agent was started with")
    left_s = found.valid_until.timestamp() - facts.now
    if facts.info and facts.info.get("cluster_id") != found.id:
        says = f"the agent uses {facts.info.get('cluster')!r} in {facts.info.get('cluster_directory')}, not {found.directory}"
        return Finding(WARN, says, f"{facts.restarts}        to keep using it:  peerload up --cluster DIR")
    if left_s < EXPIRES_WITHIN_S:
        says = f"the CA of {found.name} " + (f"expires in {duration_text(left_s)}" if left_s > 0 else "has expired")
        return Finding(WARN if left_s > 0 else FAIL, says, "make a new cluster:  peerload cluster init DIR")
    where = "this machine only" if found.is_local else f"until {found.valid_until:%Y-%m-%d}"
    return _certificate(facts) or _issuers(facts, f"{found.name} in {found.directory}, {where}")


def _issuers(facts: DoctorInput, says: str) -> Finding:
    """A warning if no member has the CA's key; else OK, with the name of the member if only one has it."""
    peers = [peer for peer in facts.checkup.get("peers", ()) if not peer.get("revoked")]
    issuers = {peer["node"]: peer["state"] for peer in peers if peer.get("issuer")}
    if facts.checkup.get("issuer"):
        issuers["this node"] = "alive"
    if peers and not any(state in ("alive", "suspect", "asleep") for state in issuers.values()):
        absent = ", ".join(f"{node} is {state}" for node, state in sorted(issuers.items())[:NAMED_MAX])
        says = "no member with the CA's key is there" + (f" ({absent})" if absent else "")
        return Finding(WARN, f"{says}: nobody can invite, and certificates are not renewed", NO_ISSUER)
    if len(issuers) == 1 and len(peers) >= PEERS_FOR_SECOND_ISSUER:
        says += f"; only {next(iter(issuers))} can invite (a second one: peerload invite --issuer)"
    return Finding(OK, says)


def _certificate(facts: DoctorInput) -> Finding | None:
    """A finding if the node's own certificate has expired, or expires soon and cannot be renewed; else None."""
    certificate_s = (facts.checkup.get("certificate_until") or facts.now + EXPIRES_WITHIN_S) - facts.now
    cannot_renew = facts.checkup.get("issuer") is False
    if certificate_s <= 0:
        fix = REJOIN if cannot_renew else facts.restarts
        return Finding(FAIL, "this node's own certificate has expired", fix)
    if cannot_renew and certificate_s < EXPIRES_WITHIN_S:
        says = f"this node's certificate expires in {duration_text(certificate_s)}, and it has no key to renew it"
        return Finding(WARN, says, REJOIN)
    return None


def listen(facts: DoctorInput) -> Finding:
    """Check that peers on other machines can reach this node."""
    if facts.config is None and not facts.info:
        return Finding(SKIP, "unknown until the settings are valid")
    address = str(facts.info.get("listen") or (facts.config.listen if facts.config is not None else ""))
    wanted = [*(facts.info.get("sought") or {}), *(facts.config.peer if facts.config is not None else ())]
    elsewhere = [peer for peer in wanted if not is_loopback(peer)]
    is_local = facts.info.get("cluster_local", facts.cluster is None or facts.cluster.is_local)
    how = (
        f"listen = in /etc/peerload, then {facts.restarts}"
        if facts.is_service
        else f"{facts.restarts} --listen ADDRESS:7117"
    )
    fix = f"{how}        with an address that the other machines reach"
    if facts.checkup.get("listen_absent"):
        says = f"this machine does not have the address of this node ({address}): no other machine can reach it"
        return Finding(FAIL, says, fix)
    if is_loopback(address) and elsewhere:
        says = f"only this machine can reach {address}, and configured peers are elsewhere: {', '.join(elsewhere[:NAMED_MAX])}"
        return Finding(FAIL, says, fix)
    if is_loopback(address) and not is_local:
        return Finding(WARN, f"it listens at {address}: no other machine can reach it", fix)
    return Finding(OK, f"{address}" + (" (this machine only)" if is_loopback(address) else ""))


def is_loopback(address: str) -> bool:
    """True if only this machine can reach the address `HOST:PORT`."""
    host = address.rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def port(facts: DoctorInput) -> Finding:
    """Check that the agent listens at its announced port, by TCP and by UDP. Does not connect to it:
    the agent would count that as an unknown peer."""
    address = str(facts.info.get("listen") or "")
    if not address:
        return Finding(SKIP, "no agent runs")
    if facts.config is not None and facts.config.advertise == address:
        return Finding(SKIP, f"{address} is forwarded to this node: only another machine can test it")
    number = address.rpartition(":")[2]
    wanted = f":{int(number):04X} "
    listens = re.compile(rf"{wanted}[0-9A-F]+:0000 {TCP_LISTENS} ")
    if not any(listens.search(facts.text(table)) for table in ("/proc/net/tcp", "/proc/net/tcp6")):
        return Finding(FAIL, f"no process accepts connections at {address}", facts.restarts)
    if wanted not in facts.text("/proc/net/udp") and wanted not in facts.text("/proc/net/udp6"):
        return Finding(FAIL, f"no process receives datagrams at {address}", facts.restarts)
    return Finding(OK, f"{address} accepts connections and datagrams (tested on this machine)")


@needs_agent
def datagrams(facts: DoctorInput) -> Finding:
    """Check that gossip arrives from the peers that are connected by TCP."""
    alive = [peer for peer in facts.peers("alive", "suspect") if (peer["met_s"] or 0.0) > MET_S_MIN]
    if not alive:
        return Finding(SKIP, "no peer has been connected for long enough")
    deaf = [peer["node"] for peer in alive if peer["datagram_age_s"] is None]
    heard = [peer["datagram_age_s"] for peer in alive if peer["datagram_age_s"] is not None]
    number = str(facts.info["listen"]).rpartition(":")[2]
    fix = f"allow UDP on both machines:  sudo ufw allow {number}/udp        sudo firewall-cmd --add-port={number}/udp"
    if not heard or min(heard) > DATAGRAM_AGE_S_MAX + 2 * len(alive):
        says = f"no datagrams arrive from {counted(len(alive), 'peer')} that TCP reaches: UDP is blocked"
        return Finding(FAIL, says, fix)
    late_s = DATAGRAM_AGE_S_MAX + ROUNDS_S * len(alive)
    late = [
        peer["node"]
        for peer in alive
        if (peer["met_s"] > 4 * len(alive) if peer["node"] in deaf else peer["datagram_age_s"] > late_s)
    ]
    if late:
        return Finding(WARN, f"no datagrams arrive from {', '.join(late[:NAMED_MAX])}", fix)
    return Finding(OK, f"datagrams arrive from {counted(len(alive), 'peer')}")


def peers(facts: DoctorInput) -> Finding:
    if not facts.info:
        return Finding(SKIP, "no agent runs")
    sought = facts.info.get("sought") or {}
    if sought:
        each = [
            f"{address} ({why.removeprefix(f'{address}: ') or 'no answer so far'})" for address, why in sought.items()
        ]
        fix = (
            "check there: does an agent run (peerload up), listen at that address, and use the same cluster directory?"
        )
        return Finding(FAIL, f"not found: {'; '.join(each[:NAMED_MAX])}", fix)
    lost = [peer["node"] for peer in facts.peers("dead", "suspect") if not peer.get("revoked")]
    shut_out = [peer["node"] for peer in facts.peers("alive", "dead", "suspect") if peer.get("revoked")]
    if lost:
        says = f"{', '.join(lost[:NAMED_MAX])} {'does' if len(lost) == 1 else 'do'} not answer"
        return Finding(WARN, says, f"if one is gone for good:  peerload forget {lost[0]}        peerload nodes")
    alive = len([node for node in facts.nodes if node.get("state") == "alive"]) - 1
    if alive < 1 and facts.info.get("remembered"):
        named = facts.unmet[:NAMED_MAX] or ["NODE"]
        says = f"{counted(facts.info['remembered'], 'member')} not met since this agent's start: {', '.join(named)}"
        return Finding(
            WARN, says, f"start it; if one is gone for good:  peerload forget {named[0]}        peerload nodes"
        )
    more = f"; revoked: {', '.join(shut_out[:NAMED_MAX])}" if shut_out else ""
    return Finding(OK, (f"{counted(alive, 'peer')} alive" if alive > 0 else "a cluster of one") + more)


@needs_agent
def ways(facts: DoctorInput) -> Finding:
    """Check for each peer that one of the two nodes can connect to the other."""
    here = facts.info.get("node")
    alive = [peer for peer in facts.peers("alive", "suspect") if "way" in peer]
    parted = [peer for peer in alive if peer["way"] == "none"]
    fix = (
        "forward a port to one of them and start it with:  peerload up --advertise GATE:PORT"
        "        or connect both by a tunnel (VPN)"
    )
    if parted:
        each = [f"{here} and {peer['node']} ({peer['way_why']})" for peer in parted[:NAMED_MAX]]
        more = f" and {len(parted) - NAMED_MAX} more" if len(parted) > NAMED_MAX else ""
        says = f"neither can dial the other: {'; '.join(each)}{more}; they exchange no tasks or requests"
        return Finding(WARN, says, fix)
    theirs = [peer for peer in alive if peer["way"] == "theirs"]
    ours = [peer for peer in alive if peer["way"] == "ours"]
    says = "; ".join(
        f"{counted(len(group), 'peer')} {words} ({group[0]['node']}: {group[0]['way_why']})"
        for group, words in ((ours, "cannot dial this node"), (theirs, "cannot be dialled from here"))
        if group
    )
    return Finding(
        OK,
        says + ": links made by the other end serve both ways"
        if says
        else "this node and its peers can dial each other",
    )


@needs_agent
def names(facts: DoctorInput) -> Finding:
    clashes = facts.checkup["clashes"]
    refused = [why for why in (facts.info.get("sought") or {}).values() if "another agent is called" in why]
    refused += [f"the peer at {by} knows another node of this name" for by in facts.checkup.get("refused_by", ())]
    fix = "restart the newer one under another name:  peerload up --node NAME --state DIR"
    if clashes:
        each = ", ".join(f"{name} (the one at {where or 'no address'} is refused)" for name, where in clashes.items())
        return Finding(FAIL, f"two agents have one name: {each}", fix)
    if refused:
        return Finding(FAIL, f"a peer refuses this node: {refused[0]}", fix)
    return Finding(OK, f"no other node is called {facts.info.get('node')}")


@needs_agent
def clocks(facts: DoctorInput) -> Finding:
    """Check the difference between the clocks of peers and this one."""
    told = {peer["node"]: peer["clock_ahead_s"] for peer in facts.peers("alive", "suspect")}
    known = {name: ahead_s for name, ahead_s in told.items() if ahead_s is not None}
    if not known:
        return Finding(SKIP, "no peer has reported its time")
    name = max(known, key=lambda one: abs(known[one]))
    off_s = abs(known[name])
    if off_s > CLOCK_S_GOOD:
        says = f"{name} was {duration_text(off_s)} {'ahead of' if known[name] > 0 else 'behind'} this machine when it connected"
        more = ": certificates and times are unreliable" if off_s > CLOCK_S_MAX else ""
        fix = f"on both:  sudo timedatectl set-ntp true        then, to look again:  {facts.restarts}"
        return Finding(FAIL if off_s > CLOCK_S_MAX else WARN, says + more, fix)
    return Finding(OK, f"{counted(len(known), 'peer')} within {off_s:.2f} s of this machine when they connected")


def drained(facts: DoctorInput) -> Finding:
    if not facts.me:
        return Finding(SKIP, "no agent runs")
    if facts.me.get("drained"):
        why = facts.me.get("drain_reason")
        return Finding(
            WARN, "this node takes no tasks" + (f': "{shortened(why, 80)}"' if why else ""), "peerload undrain"
        )
    if facts.me.get("slots") == 0:
        return Finding(WARN, "this node has no slots: it runs no tasks", "peerload up --slots N")
    if facts.me.get("trouble"):
        return Finding(FAIL, f"this node takes no tasks: {facts.me['trouble']}", "see the other checks")
    return Finding(OK, "this node takes tasks")


@needs_agent
def frozen(facts: DoctorInput) -> Finding:
    """Check for tasks of other homes that are frozen because their home is silent."""
    held = facts.checkup["frozen"]
    if held:
        home = held[0].partition("/")[0]
        says = f"{counted(len(held), 'task')} frozen, because their home does not answer: {', '.join(held[:NAMED_MAX])}"
        return Finding(
            WARN,
            says,
            f"start its agent again:  ssh {shlex.quote(home)} peerload up        gone for good:  peerload forget {home}",
        )
    return Finding(OK, "none")


ANSWERS_WITHIN_S = 3.0
VERSION_WITHIN_S = 0.5
ECHO_WITHIN_S = 1.0
VERSION_CHARACTERS_MAX = 80
ENDS_WITHIN_S = 30 * 86_400.0


class BrokerProbe(NamedTuple):
    """Result of a probe. url: without user and password; why: the reason why the broker cannot be used, "" if it can; version: as
    reported, or ""; ends_at: end of its certificate (Unix s), None without TLS; sends_password: without TLS."""

    url: str
    why: str = ""
    version: str = ""
    ends_at: float | None = None
    sends_password: bool = False


class BrokerAccess(NamedTuple):
    """Access to brokers: the settings `mqtt_ca` and `mqtt_password_file`, the cluster's CA (PEM, empty: none), and
    this node's certificate, None if only the agent can read it."""

    ca: str = ""
    password_file: str = ""
    cluster_ca: bytes = b""
    certificate: Path | None = None

    @classmethod
    def of(cls, facts: DoctorInput) -> BrokerAccess:
        if facts.config is None:
            return cls()
        certificate = Path(str(facts.info.get("state") or facts.config.state), "tls", "node.pem")
        is_ours = os.access(certificate, os.R_OK)
        cluster_ca = facts.cluster.authority.certificate if facts.cluster is not None else b""
        config = facts.config
        return cls(config.mqtt_ca, config.mqtt_password_file, cluster_ca, certificate if is_ours else None)

    def tls(self, *, shows_us: bool) -> BrokerTls:
        """TLS with this node's certificate (``shows_us``), or without one."""
        from peerload.security.broker import BrokerTls

        return BrokerTls(self.ca, self.cluster_ca, self.certificate if shows_us else None)


def probe_broker(address: str, way: BrokerAccess | None = None) -> BrokerProbe:
    """Connect with certificate, user and password as the agent would."""
    from peerload.model.errors import ConfigError
    from peerload.security.broker import BrokerUrl, broker_valid_until

    way = way or BrokerAccess()
    try:
        url = BrokerUrl.parse(address).known_as(way.password_file)
        client, answered, found = _client(url, way, shows_us=True)
    except ConfigError as error:
        return BrokerProbe("a broker", str(error))
    told = threading.Event()

    def received(_client: mqtt.Client, _data: object, message: mqtt.MQTTMessage) -> None:
        found["version"] = message.payload.decode("utf-8", "replace")[:VERSION_CHARACTERS_MAX]
        told.set()

    def let_in() -> None:
        found["ends_at"] = broker_valid_until(client.socket())
        client.subscribe("$SYS/broker/version")
        told.wait(VERSION_WITHIN_S)

    client.on_message = received
    why = _tried(client, url, answered, found, let_in)
    if why and url.tls and way.certificate is None and way.ca == "" and "no certificate was shown" in why:
        why += " (this user cannot read the node's: see what the agent reports)"
    return BrokerProbe(
        url.text, why, found.get("version", ""), found.get("ends_at"), bool(url.password and not url.tls)
    )


def anybody_may_publish(address: str, way: BrokerAccess, facts: DoctorInput) -> bool:
    """True if a client without name, password and certificate can publish below this node's topics. The test message goes
    to a topic that no agent subscribes to."""
    from peerload.model.errors import ConfigError
    from peerload.security.broker import ROOT, BrokerUrl

    name, config = facts.cluster.name if facts.cluster is not None else "local", facts.config
    node = config.node if config is not None else "node"
    topic = f"{ROOT}/{name}/main/{node}/to/doctor-{secrets.token_hex(8)}"
    try:
        url = BrokerUrl.parse(address)._replace(user=None, password=None)
        client, answered, found = _client(url, way, shows_us=False)
    except ConfigError:
        return False
    subscribed, came = threading.Event(), threading.Event()
    client.on_message = lambda *_: came.set()
    client.on_subscribe = lambda *_: subscribed.set()

    def let_in() -> None:
        client.subscribe(topic)
        if subscribed.wait(ECHO_WITHIN_S):
            client.publish(topic, b"peerload doctor: may anybody publish here?")
            came.wait(ECHO_WITHIN_S)

    _tried(client, url, answered, found, let_in)
    return came.is_set()


def _client(
    url: BrokerUrl, way: BrokerAccess, *, shows_us: bool
) -> tuple[mqtt.Client, threading.Event, dict[str, Any]]:
    """An unconnected client, an event for the broker's answer, and a dict for the data of that answer."""
    import paho.mqtt.client as mqtt
    from paho.mqtt.enums import CallbackAPIVersion

    answered = threading.Event()
    found: dict[str, Any] = {"why": f"no answer within {ANSWERS_WITHIN_S:g} s"}

    def connected(_client: mqtt.Client, _data: object, _flags: object, reason: Any, _properties: object) -> None:  # noqa: ANN401 -- the library's own
        found["why"] = f"it refuses the connection: {reason}" if reason.is_failure else ""
        answered.set()

    def gone(_client: mqtt.Client, _data: object, _flags: object, _reason: Any, _properties: object) -> None:  # noqa: ANN401 -- as above
        if not answered.is_set():
            found["why"] = (
                "it refuses the connection, perhaps because no certificate was shown"
                if url.tls
                else "it closed the connection"
            )
            answered.set()

    client = mqtt.Client(CallbackAPIVersion.VERSION2, reconnect_on_failure=False)
    client.username_pw_set(url.user, url.password)
    if url.tls:
        client.tls_set_context(way.tls(shows_us=shows_us).context())
    client.connect_timeout = ANSWERS_WITHIN_S
    client.on_connect = connected
    client.on_disconnect = gone
    return client, answered, found


def _tried(
    client: mqtt.Client, url: BrokerUrl, answered: threading.Event, found: dict[str, Any], let_in: Callable[[], None]
) -> str:
    """Connect, call let_in if the broker accepts, and disconnect → the reason of a refusal, "" if it accepted."""
    from peerload.security.broker import broker_error_text

    try:
        client.connect(url.host, url.port, keepalive=10)
        client.loop_start()
        try:
            if answered.wait(ANSWERS_WITHIN_S) and not found["why"]:
                let_in()
            client.disconnect()
        finally:
            client.loop_stop()
    except (OSError, ValueError) as error:
        return broker_error_text(error) or str(getattr(error, "strerror", None) or error) or type(error).__name__
    return str(found["why"])


def broker(facts: DoctorInput) -> Finding:
    """Check that the configured brokers answer, and accept only this node."""
    urls = list(facts.config.mqtt) if facts.config is not None else []
    told = facts.checkup.get("broker")
    if not urls and not told:
        return Finding(SKIP, "none is configured, and none is needed")
    way = BrokerAccess.of(facts)
    answers = [probe_broker(url, way) for url in urls]
    fix = "systemctl status mosquitto        TLS and passwords: docs/mqtt.md"
    failed = [answer for answer in answers if answer.why]
    if told and told["url"] is not None and not told.get("heard", True):
        says = f"{told['url']} accepts the agent, but does not forward its messages"
        rights = f"its acl_file must let each node write below its own name:   {deployed('mosquitto.acl')}"
        return Finding(FAIL, says, rights)
    if told and told["url"] is None:
        return Finding(FAIL, f"the agent is not connected: {told['why']}", fix)
    if answers and len(failed) == len(answers):
        return Finding(FAIL, "; ".join(f"{answer.url}: {answer.why}" for answer in failed), fix)
    if failed:
        return Finding(WARN, "; ".join(f"{answer.url}: {answer.why}" for answer in failed), fix)
    is_open = [answer.url for url, answer in zip(urls, answers, strict=True) if anybody_may_publish(url, way, facts)]
    if concern := _of_tls(facts, answers, is_open):
        return concern
    says = "; ".join(f"{answer.url} answers" + (f" ({answer.version})" if answer.version else "") for answer in answers)
    says += "; anybody on this machine may publish there" if is_open else ""
    return Finding(OK, says or f"in use: {told['url'] if told else ''}")


def _of_tls(facts: DoctorInput, answers: list[BrokerProbe], is_open: list[str]) -> Finding | None:
    """Security problem of the brokers, or None. is_open: addresses where everybody may publish."""
    elsewhere = [url for url in is_open if not _is_here(url.rpartition("@")[2])]
    if elsewhere:
        says = f"anybody who reaches {elsewhere[0]} may publish as a node (tested without user and certificate)"
        fix = "set up users and rights:  peerload cluster broker-certificate DIR --host NAME (docs/mqtt.md)"
        return Finding(WARN, says, fix)
    in_clear = [answer.url for answer in answers if answer.sends_password and not _is_here(answer.url)]
    if in_clear:
        says = f"the password for {in_clear[0]} is sent unencrypted"
        return Finding(WARN, says, "use mqtts:// instead of mqtt:// (docs/mqtt.md)")
    for answer in answers:
        if answer.ends_at is not None and answer.ends_at - facts.now < ENDS_WITHIN_S:
            says = f"the certificate of {answer.url} expires in {duration_text(answer.ends_at - facts.now)}"
            return Finding(WARN, says, "peerload cluster broker-certificate DIR --host NAME")
    return None


def _is_here(url: str) -> bool:
    return is_loopback(url.rpartition("://")[2])
