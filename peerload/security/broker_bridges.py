"""Brokers of several sites, joined by bridges that cannot send a message round.

Each site's nodes have topics of their own, by the setting `site`. A bridge carries those of its own site one way and those of
the other site the other way; so nothing that has come over a bridge ever goes back over one, however many there are and
whoever has set them up.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from peerload.model.errors import BadRequest, ConfigError
from peerload.security.address import parse_address
from peerload.security.broker_address import TLS_PORT

BRIDGES_MAX = 64
_SITE = re.compile(r"[a-z0-9-]{1,40}", re.ASCII)
_HINT = "--site east --bridge west=broker.west  where this broker dials that of the site west, --bridge west  where it is dialled"


class Bridge(NamedTuple):
    """To the broker of another site. host: where this one dials it; empty: it is dialled by that one."""

    site: str
    host: str = ""
    port: int = TLS_PORT


def parse_bridge(text: str) -> Bridge:
    """From `SITE`, `SITE=HOST` or `SITE=HOST:PORT`, an IPv6 address in brackets. Raises BadRequest."""
    site, equals, where = text.partition("=")
    check_site(site)
    if not equals:
        return Bridge(site)
    has_port = where.endswith("]") is False and ":" in where
    try:
        host, port = parse_address("bridge", where if has_port else f"{where}:{TLS_PORT}", loopback_only=False)
    except ConfigError as error:
        raise BadRequest(f"--bridge {text[:100]!r} is no SITE=HOST", why=error.says, hint=error.hint or _HINT) from None
    if not port:
        raise BadRequest(f"--bridge {text[:100]!r} is no SITE=HOST", why="no broker has port 0", hint=_HINT)
    return Bridge(site, host, port)


def check_site(site: str) -> None:
    """That nodes can have this as their setting `site`. Raises BadRequest."""
    if _SITE.fullmatch(site) is None:
        raise BadRequest(f"{site[:100]!r} is no site", why="a-z, 0-9 and -, at most 40 characters", hint=_HINT)


def check(site: str, bridges: tuple[Bridge, ...]) -> None:
    """That these make sense together for the broker of that site. Raises BadRequest."""
    if bridges and not site:
        raise BadRequest("a bridge needs to know which site this broker is for", hint=_HINT)
    others = [bridge.site for bridge in bridges]
    if site in others:
        raise BadRequest(f"a broker has no bridge to its own site ({site})", hint=_HINT)
    if len(set(others)) < len(others):
        raise BadRequest("one bridge joins two sites", why="with two of them each message would come twice", hint=_HINT)
    if len(others) > BRIDGES_MAX:
        raise BadRequest(f"at most {BRIDGES_MAX} bridges", hint=_HINT)


def user_of(site: str) -> str:
    """The name by which another broker knows the bridge of this site. No node can have it: it has a dot."""
    return f"bridge.{site}"


def configuration(site: str, bridges: tuple[Bridge, ...], place: str) -> str:
    """More lines of mosquitto.conf: the bridges that this site's broker makes. place: where the files lie."""
    return "".join(_connection(site, bridge, place) for bridge in bridges if bridge.host)


def _connection(site: str, bridge: Bridge, place: str) -> str:
    return f"""
# To the broker of the site {bridge.site}, by TLS. Each site's own topics go one way: nothing that has come over a bridge goes back.
connection peerload-{site}-{bridge.site}
address {bridge.host}:{bridge.port}
bridge_cafile {place}/ca.pem
bridge_certfile {place}/bridge.pem
bridge_keyfile {place}/bridge.key
bridge_tls_version tlsv1.3
topic peerload/+/{site}/# out 0
topic peerload/+/{bridge.site}/# in 0
try_private true
cleansession true
notifications false
keepalive_interval 10
restart_timeout 1 30
"""


def rights(site: str, bridges: tuple[Bridge, ...]) -> str:
    """More lines of mosquitto.acl: what the bridges of others may that dial this site's broker."""
    return "".join(
        f"""
# The bridge of the site {bridge.site}: it brings what that site's nodes say, and takes what this site's say.
user {user_of(bridge.site)}
topic write peerload/+/{bridge.site}/#
topic read peerload/+/{site}/#
"""
        for bridge in bridges
        if not bridge.host
    )
