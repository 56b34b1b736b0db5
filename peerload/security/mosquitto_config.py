"""Files for a Mosquitto that serves a cluster by TLS: certificate and key, access rights, and configuration."""

from __future__ import annotations

import ipaddress
import os
import re
from typing import TYPE_CHECKING

from peerload.model.errors import BadRequest
from peerload.security import certificates
from peerload.security.private_files import make_directory

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime
    from pathlib import Path

    from peerload.security.cluster_dir import ClusterDirectory

PLACE = "/etc/mosquitto/peerload"
"""The directory of the files on the broker's machine."""
HOSTS_MAX = 16
_HOST = re.compile(r"(?!-)[A-Za-z0-9-]{1,63}(\.(?!-)[A-Za-z0-9-]{1,63})*", re.ASCII)
_HOST_LENGTH_MAX = 253

ACL = """\
# Who may publish and read what, for a Mosquitto whose clients are known by their certificates (use_identity_as_username):
# %u is the node's name. A node writes below its own name alone, and reads what is for everybody or for itself.
pattern write peerload/+/+/%u/#
pattern read peerload/+/+/+/state
pattern read peerload/+/+/+/ask
pattern read peerload/+/+/+/to/%u
pattern read $SYS/broker/version

# A node that was revoked can read nothing of use any more and is not believed. To keep it from connecting to any topic, too:
#   user NODE
#   topic deny #
# then: systemctl reload mosquitto
"""
CONFIGURATION = f"""\
# Mosquitto (2.0 or newer) for peerload's load announcements, by TLS: only nodes of the cluster come in, each known by its
# certificate, and writes below its own name alone (mosquitto.acl). It carries advice only: with the broker away nodes speak
# to each other directly, and nothing durable is lost with it.
#
# `peerload cluster broker-certificate DIR --host NAME` makes all files named here. Mosquitto reads them as its own user.
listener 8883
cafile {PLACE}/ca.pem
certfile {PLACE}/broker.pem
keyfile {PLACE}/broker.key
tls_version tlsv1.3
require_certificate true
use_identity_as_username true
allow_anonymous false
acl_file {PLACE}/mosquitto.acl

# Without it a small message may wait 40 ms for the acknowledgement of the last one.
set_tcp_nodelay true

# A new node gets the retained state of all others at once: keep this above the number of nodes. What is over it is dropped.
max_queued_messages 10000
max_inflight_messages 100

# peerload's messages have at most 4 KiB; anything larger is not from it.
max_packet_size 16384

# What a client may cost: a frozen subscriber fills its queue and no more.
memory_limit 268435456

# A node that ends without a goodbye is noticed after one and a half times its keep-alive.
max_keepalive 120
"""


def make(cluster: ClusterDirectory, directory: Path, hosts: Sequence[str], now: datetime) -> datetime:
    """Make ``directory`` with ca.pem, broker.pem, broker.key, mosquitto.acl and mosquitto.conf → the end of the
    certificate's validity. hosts: names and addresses by which nodes reach the broker. Raises BadRequest, and leaves
    nothing then."""
    for host in hosts:
        if not _is_host(host):
            raise BadRequest(f"{host[:100]!r} is not a host name or address", hint="--host broker.lab")
    if not 0 < len(hosts) <= HOSTS_MAX:
        raise BadRequest(f"name 1 to {HOSTS_MAX} hosts by which nodes reach the broker", hint="--host broker.lab")
    if os.path.lexists(directory):
        raise BadRequest(f"{directory} exists", why="nothing is overwritten", hint="name another directory")
    pair = certificates.certify_broker(cluster.authority, hosts, now)
    contents = {
        "ca.pem": cluster.authority.certificate,
        "broker.pem": pair.certificate,
        "broker.key": pair.key,
        "mosquitto.acl": ACL.encode(),
        "mosquitto.conf": CONFIGURATION.encode(),
    }
    try:
        make_directory(directory, contents)
    except OSError as error:
        raise BadRequest(f"{directory} cannot be made", why=str(error.strerror)) from None
    return certificates.valid_until(pair.certificate)


def _is_host(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return len(text) <= _HOST_LENGTH_MAX and _HOST.fullmatch(text) is not None
    return True
