"""`peerload nodes`: the nodes of the cluster and their GPUs."""

from __future__ import annotations

import sys

from peerload.cli.common.options import Options
from peerload.client.connection import Client
from peerload.model.text import printable
from peerload.text.format import print_json, terminal_columns
from peerload.text.nodes import (
    HEADINGS,
    WIDE_HEADINGS,
    gpu_table,
    node_cells,
    node_table,
    shared_machine_lines,
)


def main(words: list[str]) -> int:
    """Run the verb."""
    reader = Options(
        "nodes",
        "List the nodes: state, busy and all cores, used and all memory, GPUs, running and queued tasks, and how long ago they\n"
        "were last heard of. Then the GPUs: model, how busy, memory in use by tasks and by other programs, tasks.",
    )
    reader.switch(
        "--wide",
        help="also: cores that other programs keep busy, load index and region of the policy, incarnation (counts its starts)",
    )
    reader.at()
    flags = reader.read(words)
    with Client(flags.socket) as client:
        nodes = client.call("nodes", at=flags.at)["nodes"]
    if flags.json:
        print_json({"nodes": nodes})
        return 0
    headings, columns = WIDE_HEADINGS if flags.wide else HEADINGS, terminal_columns()
    lines = node_table(headings, [node_cells(node, headings) for node in nodes], columns)
    lines += gpu_table(nodes, columns)
    lines += [
        f"{printable(str(node.get('node', '')))} has no GPUs: {printable(str(node['no_gpus_because']))}"
        for node in nodes
        if node.get("no_gpus_because")
    ]
    lines += shared_machine_lines(nodes)
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    return 0
