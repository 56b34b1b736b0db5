"""`peerload cluster broker-certificate`: what a Mosquitto needs to serve the cluster by TLS, in one directory."""

from __future__ import annotations

import shlex
import sys
from datetime import UTC, datetime

from peerload.model.errors import BadRequest
from peerload.model.text import printable
from peerload.text.format import print_json

TLS_PORT = 8883
TYPE_CHECKING = False
if TYPE_CHECKING:
    from argparse import Namespace
    from pathlib import Path

    from peerload.security.cluster_dir import ClusterDirectory


def make_files(directory: Path, flags: Namespace, cluster: ClusterDirectory) -> int:
    """Make them in a new directory, and say what to type next. flags: `host` and `json` of the command line. Raises
    BadRequest."""
    from peerload.security import mosquitto_config

    if cluster.is_local:
        why = "this node is of no cluster beyond this machine"
        raise BadRequest("no certificate is made for a broker", why=why, hint="make one:  peerload invite")
    if not cluster.is_issuer:
        raise BadRequest(
            "no certificate is made for a broker",
            why="this node does not have the key of the cluster's CA",
            hint="type it where the cluster was made; which nodes have the key:  peerload invite",
        )
    hosts: list[str] = flags.host or []
    valid_until = mosquitto_config.make(cluster, directory, hosts, datetime.now(UTC))
    if flags.json:
        print_json({"directory": str(directory), "hosts": hosts, "valid_until": valid_until.timestamp()})
        return 0
    url = f"mqtts://{f'[{hosts[0]}]' if ':' in hosts[0] else hosts[0]}:{TLS_PORT}"
    place, there = printable(shlex.quote(str(directory))), mosquitto_config.PLACE
    sys.stdout.write(
        f"{place} has what a Mosquitto at {printable(', '.join(hosts))} needs, valid until {valid_until:%Y-%m-%d}. "
        "broker.key is a secret.\n"
        f"On its machine:   sudo install -d -o mosquitto -m 700 {there} ; sudo install -o mosquitto -m 400 {place}/* {there}\n"
        f"                  sudo ln -s {there}/mosquitto.conf /etc/mosquitto/conf.d/peerload.conf ; sudo systemctl restart mosquitto\n"
        f'On every node:    mqtt = ["{printable(url)}"]  in its configuration, or  --mqtt {printable(url)}\n'
    )
    return 0
