"""`peerload web`: the cluster in a browser, as metrics and as JSON."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from peerload.cli.common.options import Options
from peerload.client.connection import AgentConnection
from peerload.distribution import how_to_add
from peerload.model.errors import PeerloadError
from peerload.text.format import print_result


def main(words: list[str]) -> int:
    reader = Options("web", "Show the cluster in a browser, and serve /metrics and a JSON API, until Ctrl-C.")
    reader.switch("--open", help="open it in a browser; if a server runs already, that one")
    reader.flag(
        "--listen HOST:PORT|PATH",
        default="",
        help="address (127.0.0.1:7118, or another port if it is taken); TLS is needed except on loopback",
    )
    reader.flag("--host NAME …", help="also accept this host name (repeatable)")
    reader.flag("--tls-cert FILE", default="", help="certificate in PEM")
    reader.flag("--tls-key FILE", default="", help="its key in PEM")
    reader.flag("--tokens DIR", default="", help="directory of its tokens (default: STATE/web)")
    flags = reader.read(words)
    try:
        from peerload.web import server
    except ImportError as error:
        if error.name not in ("h11", "prometheus_client"):
            raise
        raise PeerloadError("the web server is not installed", why=str(error), hint=how_to_add("web")) from None
    with AgentConnection(flags.socket) as client:
        info, path = client.call("info"), client.path
    own = Path(flags.tokens).absolute() if flags.tokens else _tokens_of(info)
    # The agent's own server (`[web] listen`) belongs to its user; root may use it, too.
    places = (own, Path(info["state"], "web")) if os.geteuid() == 0 and not flags.tokens else (own,)
    for place in places if flags.open else ():
        url = server.running(place)
        if url and flags.listen in ("", urlsplit(url).netloc):
            return _told(url, flags)
    settings = server.ServerSettings(path, flags.listen, own, tuple(flags.host), flags.tls_cert, flags.tls_key)
    return server.run(settings, lambda url: _told(url, flags))


def _tokens_of(info: dict[str, Any]) -> Path:
    """The directory of this user's tokens: within the agent's state directory if this user owns the agent."""
    state = Path(info["state"])
    try:
        is_own = state.stat().st_uid == os.geteuid()
    except OSError:
        is_own = False
    base = state if is_own else Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser() / "peerload"
    return base / "web"


def _told(url: str, flags: Any) -> int:  # noqa: ANN401 -- argparse's own
    print_result({"url": url}, [url], as_json=flags.json)
    if flags.open:
        import webbrowser

        webbrowser.open(url)
    return 0
