#!/usr/bin/env python3
"""Check the nodes before training on them. Run on each node, at the same time,

    python scripts/doctor.py --rank R --nodes N --master IP --data DIR

with the master's address and --port that the training will use; scripts/doctor.sh does it from one
machine, over ssh. Checks ports, interfaces, names, versions, data, limits, clocks, and the speed of
disk, decoding and network; says of each fault what it means and what to do.

Exit code, the same on every node: 0 all is well, 1 warnings (training will work, but look at them),
2 faults (or options that cannot be used). Node 0 prints all findings, the others those about
themselves.
"""

import argparse
import json
import os
import secrets
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from checkup import findings, judge_network, judge_nodes, judge_speed, visitor  # noqa: E402
from checkup.findings import FAULT, Checkup, Finding  # noqa: E402
from checkup.meeting import Host, NoMeeting  # noqa: E402
from checkup.node import TORCH_LIMIT, Node  # noqa: E402
from checkup.shapes import DOCTOR  # noqa: E402

from utils.errors import UserError, go_on_without_reader, report  # noqa: E402
from utils.launch import network  # noqa: E402
from utils.option_types import amount, count, number, positive  # noqa: E402

LONG = 3600.0  # seconds; listing ImageNet for the first time on a network disk takes minutes
STREAMS = (1, 4)  # numbers of parallel connections whose bandwidth is measured
STREAM_SECONDS = 0.3
REFUSALS_SHOWN = 5


def main() -> int:
    args = parse()
    sys.stdout.reconfigure(errors="replace")  # a terminal without UTF-8 still gets its answer
    node = Node(args)
    try:
        if args.rank == 0:
            return node_0(args, node)
        link = visitor.visit(args.master, args.port, node.card(), args.wait, DOCTOR)
        node.seen_from = link.getsockname()[0]
        farewell = visitor.serve(link, node.handlers, DOCTOR)
    except NoMeeting as fault:
        why = "a training could not start on this node either"
        findings.show([Finding(fault.name, FAULT, fault.sentence, why, fault.remedy)])
        return findings.EXIT[FAULT]
    finally:
        node.close()
    mine = [Finding(**one) for one in farewell["findings"]]
    findings.show(mine)
    own = findings.verdict(mine) if mine else "nothing is wrong"
    everyone = findings.clean(farewell["verdict"])
    print(f"node {args.rank}: {own}; all nodes: {everyone} (see node 0)")
    return int(farewell["code"])


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    env = os.environ
    add = parser.add_argument
    rank = env.get("NODE_RANK", "0")
    add("--rank", type=count, default=rank, metavar="R", help="of this node ($NODE_RANK, else 0)")
    add("--nodes", type=positive, default=1, metavar="N", help="how many nodes take part (1)")
    add(
        "--master",
        default=env.get("MASTER_ADDR"),
        metavar="IP",
        help="address of node 0 ($MASTER_ADDR)",
    )
    add(
        "--port",
        type=number(int, 1, 65535),
        default=env.get("MASTER_PORT", "8888"),
        help="master port of the training ($MASTER_PORT, else 8888)",
    )
    add(
        "--data",
        default=env.get("IMAGENET_DIR", "/data"),
        metavar="DIR",
        help="image folder of this node ($IMAGENET_DIR, else /data)",
    )
    add("-a", "--arch", default="resnet50", help="model for the forecast (resnet50)")
    add(
        "-b",
        "--batch-size",
        type=positive,
        default=128,
        metavar="N",
        help="images per process (128)",
    )
    add("--image-size", type=positive, default=224, metavar="PX", help="side of the crops (224)")
    add("-j", "--workers", type=count, metavar="N", help="loader workers per node (its cores)")
    add(
        "--need",
        type=amount,
        metavar="IMAGES_PER_S",
        help="the training speed of one GPU, as --dummy of the training scripts measures it "
        "(default: published figures for known GPUs)",
    )
    add("--output-dir", default="runs", metavar="DIR", help="where runs will be written (runs)")
    add(
        "--wait",
        type=amount,
        default=60.0,
        metavar="SECONDS",
        help="time for the others to come (60)",
    )
    add(
        "--quick",
        action="store_true",
        help="skip what needs torch: decoding, all-reduce, forecast",
    )
    add("--json", metavar="FILE", help="on node 0: write all findings and figures there")
    args = parser.parse_args()
    if args.nodes > 1 and not args.master:
        raise UserError(f"--nodes {args.nodes} needs --master, the IP address of node 0")
    if not 0 <= args.rank < args.nodes:
        raise UserError(f"--rank {args.rank} is not one of 0 to {args.nodes - 1}")
    args.master = args.master or "127.0.0.1"
    return args


def node_0(args: argparse.Namespace, node: Node) -> int:
    """Meet the others, ask and measure, judge, report to all. Returns the exit code."""
    check = Checkup(args.nodes, vars(args))
    host = Host(args.port, args.nodes, node.handlers, DOCTOR)
    began, said = time.monotonic(), []

    def say_once(missing: list[int]) -> None:
        if not said and time.monotonic() - began > 2:
            said.append(waiting(missing, args))
            print(said[0], flush=True)

    host.welcome(args.wait, say_once)
    print_refused(host)
    check.missing = host.missing
    check.clocks = host.clocks()
    for rank, found in host.ask("facts", seconds=LONG).items():
        if "error" in found:
            check.lost[rank] = found["error"]
        else:
            check.facts[rank] = found
    if 0 not in check.facts:
        raise UserError(f"node 0 cannot examine itself: {check.lost[0]}")
    try_links(host, check)
    if not args.quick:
        use_torch(host, check)
    judges = (judge_network.judge, judge_nodes.judge, judge_speed.judge)
    found = [finding for judge in judges for finding in judge(check)]
    code = findings.worst(found)
    host.dismiss(
        lambda rank: {
            "findings": [one.as_dict() for one in found if rank in one.nodes],
            "code": code,
            "verdict": findings.verdict(found),
        }
    )
    findings.show(found)
    print(findings.verdict(found))
    if args.json:
        write_json(Path(args.json), check, found)
    return code


def waiting(missing: list[int], args: argparse.Namespace) -> str:
    ranks = ", ".join(map(str, missing))
    return f"waiting up to {args.wait:g} s for the doctor on node {ranks} ..."


def print_refused(host: Host) -> None:
    """Say who was not let in, and why; of many, the most frequent."""
    counts = host.refused.most_common()
    for sentence, times in counts[:REFUSALS_SHOWN]:
        print(findings.clean(f"refused {sentence}" + (f" ({times} times)" if times > 1 else "")))
    if len(counts) > REFUSALS_SHOWN:
        rest = sum(times for _, times in counts[REFUSALS_SHOWN:])
        print(f"refused {rest} more connection{'s' * (rest > 1)}", flush=True)


def try_links(host: Host, check: Checkup) -> None:
    """Let every node try its ways to the others; if all are open, send round a ring at once."""
    if len(check.facts) < 2:
        return
    token = secrets.token_hex(16)
    opened = host.ask("open", {rank: {"token": token} for rank in check.facts})
    targets = {}
    for rank, answer in opened.items():
        if "ports" in answer:
            ways = check.facts[rank]["ways"]
            chosen = [ways.get("gloo", {}).get("address"), ways["address"]]
            chosen.append(ways.get("nccl", {}).get("address"))
            addresses = list(dict.fromkeys(address for address in chosen if address))
            targets[rank] = {"rank": rank, "addresses": addresses, "ports": answer["ports"]}
    wanted = {
        rank: {"token": token, "targets": [one for to, one in targets.items() if to != rank]}
        for rank in targets
    }
    probed = host.ask("probe", wanted, seconds=60.0)
    for rank, answer in probed.items():
        check.ways += [way | {"from": rank} for way in answer.get("ways", ())]
    for rank, answer in (opened | probed).items():
        if "error" in answer:
            check.lost[rank] = answer["error"]
    closed = any(way["reason"] for way in check.ways)
    if len(targets) == check.nodes and not closed and not check.lost:
        for streams in STREAMS:
            how = {"token": token, "streams": streams, "seconds": STREAM_SECONDS}
            ring = {rank: how | {"target": targets[(rank + 1) % check.nodes]} for rank in targets}
            answers = host.ask("transfer", ring, seconds=60.0)
            check.lost |= {r: a["error"] for r, a in answers.items() if "error" in a}
            if check.lost:
                break
            check.ring[streams] = {r: a["bytes_per_s"] for r, a in answers.items()}


def use_torch(host: Host, check: Checkup) -> None:
    """Measure decoding on every node, and all-reduces if all ways between them are open."""
    reachable = bool(check.ring)
    gpus = all(facts["gpus"]["names"] for facts in check.facts.values())
    ports = [network.free_port("") for _ in range(2)]
    wanted = {}
    for rank, one in check.facts.items():
        if one["versions"]["torch"] is None:
            continue
        ring = None
        if reachable:
            ring = {
                "rank": rank,
                "nodes": check.nodes,
                "master": check.options["master"],
                "port": ports[0],
                "port2": ports[1],
                "interface": one["ways"]["default"],
                "nccl": gpus,
            }
        wanted[rank] = {"ring": ring, "data": "error" not in one["data"]}
    check.torch = host.ask("torch", wanted, seconds=TORCH_LIMIT + 30)


def write_json(path: Path, check: Checkup, found: list[Finding]) -> None:
    """Write the findings and the measurements behind them; in seconds and bytes per second."""
    link = judge_speed.link_of(check) if check.nodes > 1 else None
    content = {
        "options": check.options,
        "exit_code": findings.worst(found),
        "findings": [one.as_dict() for one in found],
        "nodes": check.facts,
        "clocks": {rank: {"ahead_s": a, "error_s": e} for rank, (a, e) in check.clocks.items()},
        "ways": check.ways,
        "ring_bytes_per_s": check.ring,
        "torch": check.torch,
        "link": {"bytes_per_s": link[0], "latency_s": link[1]} if link else None,
        "forecast": judge_speed.predict(check) if check.nodes > 1 else None,
    }
    try:
        path.write_text(json.dumps(content, indent=1) + "\n")
    except OSError as fault:
        raise UserError(f"{path} cannot be written: {fault.strerror}") from None


if __name__ == "__main__":
    go_on_without_reader()
    try:
        sys.exit(main())
    except UserError as error:
        sys.exit(report(error))
    except KeyboardInterrupt:
        sys.exit(130)
