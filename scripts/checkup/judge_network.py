"""Can the nodes reach each other as training must? Judges ports, interfaces, names and clocks."""

import ipaddress
from collections.abc import Iterator
from typing import Any

from checkup.findings import FAULT, OK, WARNING, Checkup, Finding

CLOCK_LIMIT = 2.0  # seconds
_NO_SENTENCE = "training would hang there, or end in a time-out that does not say why"


def judge(check: Checkup) -> Iterator[Finding]:
    """All findings about the way from node to node; none for one node."""
    if check.nodes > 1:
        for judge_one in (_present, _master, _interfaces, _data_ports, _mtu, _names, _clocks):
            yield from judge_one(check)


def _present(check: Checkup) -> Iterator[Finding]:
    place = f"{check.options['master']}:{check.options['port']}"
    if check.missing:
        yield Finding(
            "nodes-missing",
            FAULT,
            f"{len(check.missing)} of {check.nodes} nodes did not connect to {place} within "
            f"{check.options['wait']:g} s: node {', '.join(map(str, check.missing))}",
            "a training waits for all of its nodes",
            "start the doctor there as well, within that time; if it cannot reach this node, "
            "follow its advice",
            check.missing,
        )
    else:
        yield Finding(
            "nodes", OK, f"master port {place}: {check.nodes} of {check.nodes} nodes connected"
        )
    for rank, reason in check.lost.items():
        yield Finding(
            "node-lost",
            FAULT,
            f"{check.node(rank)} did not finish the check: {reason}",
            "whatever was not checked there may be wrong",
            "look at the doctor's output on that node",
            [rank],
        )


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def _master(check: Checkup) -> Iterator[Finding]:
    master, mine = check.options["master"], check.facts[0]
    from_afar = [r for r, f in check.facts.items() if r and not _is_loopback(f["seen_from"])]
    if mine["master_is"] and _is_loopback(mine["master_is"]) and from_afar:
        yield Finding(
            "master-name",
            FAULT,
            f"{check.node(0)} resolves the name {master} to its own loopback address "
            f"{mine['master_is']}",
            "node 0 would send the others to an address that leads back to themselves",
            "on every node, give node 0's IP address in place of its name",
            [0],
        )
    elif not mine["owns_master"]:
        yield Finding(
            "master-address",
            WARNING,
            f"--master {master} is not an address of {check.node(0)}, which has "
            f"{', '.join(mine['ways']['interfaces'].values())}",
            "a public or translated address is slower, and often lets only single ports through",
            "give the private address at which the nodes reach each other",
            [0],
        )


def _closed(check: Checkup, target: int, address: str | None) -> dict[int, list[dict[str, Any]]]:
    """The ways to an address of ``target`` that are closed, by the node that tried them."""
    found: dict[int, list[dict[str, Any]]] = {}
    for way in check.ways:
        if way["to"] == target and way["address"] == address and way["reason"]:
            found.setdefault(way["from"], []).append(way)
    return found


def _interfaces(check: Checkup) -> Iterator[Finding]:
    wrong, used = set(), {}
    for rank, facts in check.facts.items():
        ways = facts["ways"]
        used[rank] = ways["default"] or ways["address"]
        for library in ("gloo", "nccl"):
            chosen = ways.get(library)
            if not chosen:
                continue
            if library == "gloo":
                used[rank] = chosen["interface"]
            problem = chosen.get("error")
            if not problem and chosen["address"] != ways["address"]:
                blocked = _closed(check, rank, chosen["address"])
                if blocked and not _closed(check, rank, ways["address"]):
                    first = next(iter(blocked.values()))[0]
                    problem = (
                        f"has the address {chosen['address']}, where "
                        f"{check.named(list(blocked))} cannot reach it ({first['reason']})"
                    )
            if problem:
                wrong.add(rank)
                # Without GPUs nothing reads NCCL's variable.
                harmless = library == "nccl" and not facts["gpus"]["names"]
                yield Finding(
                    "interface",
                    WARNING if harmless else FAULT,
                    f"{check.node(rank)}: {chosen['variable']}={chosen['value']}, but "
                    f"{chosen['interface']} {problem}",
                    "the other nodes will try to connect to the address of that interface; "
                    + _NO_SENTENCE,
                    f"unset {chosen['variable']}"
                    + (f", or set it to {ways['default']}" if ways["default"] else "")
                    + f" (packets to the master leave by {ways['default'] or ways['address']})",
                    [rank],
                )
    if not wrong:
        names = ", ".join(sorted(set(map(str, used.values()))))
        yield Finding("interface", OK, f"interface: {names} leads to the other nodes")


def _data_ports(check: Checkup) -> Iterator[Finding]:
    tried = {(way["from"], way["to"]) for way in check.ways}
    faults = 0
    for rank, facts in check.facts.items():
        blocked = _closed(check, rank, facts["ways"]["address"])
        if not blocked:
            continue
        faults += 1
        reasons = sorted({way["reason"] for some in blocked.values() for way in some})
        ports = sorted({way["port"] for some in blocked.values() for way in some})
        yield Finding(
            "data-ports",
            FAULT,
            f"data ports of {check.node(rank)} are closed: {check.named(sorted(blocked))} cannot "
            f"connect to {facts['ways']['address']}, ports {' and '.join(map(str, ports))} "
            f"({', '.join(reasons)})",
            "gradients travel over ports that the kernel chooses; the master port is only where "
            f"the nodes meet; {_NO_SENTENCE}",
            "open all TCP ports between the nodes, in both directions, in that node's firewall or "
            f"security group (at least {facts['limits']['data_ports']})",
            [rank],
        )
    if tried and not faults:
        directions = len(check.facts) * (len(check.facts) - 1)
        yield Finding(
            "data-ports", OK, f"data ports: open in {directions} of {directions} directions"
        )


def _mtu(check: Checkup) -> Iterator[Finding]:
    sizes = {rank: facts["ways"]["mtu"] for rank, facts in check.facts.items()}
    if len(set(sizes.values()) - {None}) > 1:
        listed = ", ".join(f"{size} on {check.node(rank)}" for rank, size in sizes.items())
        yield Finding(
            "mtu",
            WARNING,
            f"the largest packet (MTU) differs: {listed}",
            "small messages get through but large ones can vanish, and training then hangs at its "
            "first all-reduce",
            "set the same MTU on the interfaces of all nodes",
            list(sizes),
        )


def _names(check: Checkup) -> Iterator[Finding]:
    good = True
    for rank, facts in check.facts.items():
        name, problem, remedy = facts["name"], None, None
        if not name["addresses"]:
            problem = f"its own name {name['host']} cannot be resolved ({name['error']})"
            remedy = f"add '{facts['ways']['address']} {name['host']}' to /etc/hosts there"
        elif all(map(_is_loopback, name["addresses"])) and not _is_loopback(facts["seen_from"]):
            problem = f"its own name {name['host']} resolves to {', '.join(name['addresses'])}"
            remedy = (
                f"in /etc/hosts there, put {facts['ways']['address']} in place of "
                f"{name['addresses'][0]} before {name['host']}"
            )
        if problem and remedy:
            good = False
            yield Finding(
                "own-name",
                WARNING,
                f"{check.node(rank)}: {problem}",
                "this suite trains nevertheless, as it uses interfaces and IP addresses; torchrun "
                "with --rdzv_backend=c10d, and gloo without GLOO_SOCKET_IFNAME, fail",
                remedy,
                [rank],
            )
    if good:
        yield Finding("own-name", OK, "own names: each node resolves its host name to itself")


def _clocks(check: Checkup) -> Iterator[Finding]:
    wrong = {
        rank: ahead
        for rank, (ahead, error) in check.clocks.items()
        if abs(ahead) - error > CLOCK_LIMIT
    }
    for rank, ahead in wrong.items():
        yield Finding(
            "clock",
            WARNING,
            f"the clock of {check.node(rank)} is {abs(ahead):.1f} s "
            f"{'ahead of' if ahead > 0 else 'behind'} that of {check.node(0)}",
            "logs of the nodes cannot be compared, files on a shared disk seem to come from the "
            "future, and object stores refuse requests once it is minutes",
            "turn on time synchronisation there (timedatectl set-ntp true, or chrony)",
            [rank],
        )
    if check.clocks and not wrong:
        most = max(abs(ahead) for ahead, _ in check.clocks.values())
        error = max(error for _, error in check.clocks.values())
        yield Finding(
            "clock", OK, f"clocks: at most {1000 * most:.0f} ms apart (± {1000 * error:.1f})"
        )
