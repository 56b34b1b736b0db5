"""`peerload web`: the cluster in a browser, as metrics and as JSON."""

from __future__ import annotations

import os
import sys
from typing import Any

from peerload.cli.common.options import Options
from peerload.client.connection import AgentConnection
from peerload.distribution import how_to_add
from peerload.model.errors import PeerloadError
from peerload.text.format import print_json


def main(words: list[str]) -> int:
    """Run the verb."""
    reader = Options("web", "Show the cluster in a browser, and serve /metrics and a JSON API, until Ctrl-C.")
    reader.switch("--open", help="open it in a browser; if a server runs already, that one")
    reader.flag(
        "--listen",
        default="",
        metavar="HOST:PORT|PATH",
        help="where (127.0.0.1:7118); elsewhere than on loopback with TLS",
    )
    reader.flag("--host", action="append", default=[], metavar="NAME", help="serve under this name, too (repeatable)")
    reader.flag("--tls-cert", default="", metavar="FILE", help="certificate in PEM")
    reader.flag("--tls-key", default="", metavar="FILE", help="its key in PEM")
    reader.flag("--tokens", default="", metavar="DIR", help="directory of its tokens (default: STATE/web)")
    flags = reader.read(words)
    try:
        from peerload.web import server
    except ImportError as error:
        if error.name not in ("h11", "prometheus_client"):
            raise
        raise PeerloadError("the web server is not installed", why=str(error), hint=how_to_add("web")) from None
    with AgentConnection(flags.socket) as client:
        info, path = client.call("info"), client.path
    tokens = os.path.abspath(flags.tokens or _tokens_of(info))  # noqa: PTH100
    listen = flags.listen or f"127.0.0.1:{server.PORT_DEFAULT}"
    settings = server.settings(path, listen, tokens, tuple(flags.host), flags.tls_cert, flags.tls_key)
    if flags.open and (url := server.running(settings)):
        return _told(url, flags)
    return server.run(settings, lambda url: _told(url, flags))


def _tokens_of(info: dict[str, Any]) -> str:
    """The directory of the tokens: the agent's, if it is this user's."""
    state = str(info["state"])
    if os.access(state, os.W_OK):
        return os.path.join(state, "web")  # noqa: PTH118
    base = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")  # noqa: PTH111
    return os.path.join(base, "peerload", "web")  # noqa: PTH118


def _told(url: str, flags: Any) -> int:  # noqa: ANN401 -- argparse's own
    """Print where it is, and open it."""
    if flags.json:
        print_json({"url": url})
    else:
        sys.stdout.write(f"{url}\n")
    sys.stdout.flush()
    if flags.open:
        import webbrowser

        webbrowser.open(url)
    return 0
