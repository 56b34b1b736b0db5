"""`peerload release`: let held tasks go on."""

from __future__ import annotations

import sys

from peerload.cli.common import selection
from peerload.cli.common.errors import CANNOT
from peerload.cli.common.options import Options
from peerload.client.connection import Client
from peerload.text.format import print_json
from peerload.text.tasks import collapsed


def main(words: list[str]) -> int:
    """Run the verb."""
    reader = Options(
        "release",
        "Let held tasks go on: those kept back by  peerload hold  or  submit --held,  and those held because nodes went\n"
        "away under them.",
    )
    selection.add(reader, changes=True)
    flags = reader.read(words)
    chosen_by = selection.Selection(flags, "release")
    with Client(flags.socket) as client:
        chosen = chosen_by.chosen(client, ("held",))
        if chosen is None:
            return CANNOT
        reply = selection.changed(client, "release", chosen)
    released, not_held = reply.get("released", []), reply.get("not_held", [])
    if flags.json:
        print_json({"released": released, "not_held": not_held})
        return 0
    lines = [f"{line}  released\n" for line in collapsed(released)]
    lines += [f"{line}  is not held\n" for line in collapsed(not_held)]
    sys.stdout.write("".join(lines))
    return 0
