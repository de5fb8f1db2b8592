"""Why a collective operation failed, in one sentence, as far as the error's text says."""

import re
from typing import NamedTuple

import torch.distributed as dist


class Peer(NamedTuple):
    """A process of the job: the name of its node, and the address at which others reach it."""

    node: str
    address: str | None


# What gloo, NCCL and the store write when another process is gone or stuck.
_FAILURE = re.compile(
    r"gloo|nccl|connection (reset|closed|refused)|broken pipe|timed out", re.IGNORECASE
)
_ADDRESS = re.compile(r"\[([0-9a-fA-F.:]+)\]:\d+")  # as gloo writes it
# In this order: NCCL's text on a remote error names the network as well.
_CAUSES = {
    r"timed out|timeout": "no answer within {seconds:g} s (--dist-timeout): that process hangs, or "
    "its machine or the link to it is down",
    r"cuda error|out of memory": "CUDA failed in this process, or its memory is full",
    r"connection (was )?(likely )?(reset|closed|refused)|broken pipe|remote|abort": "that process "
    "has ended or was killed, or its machine was",
    r"no route|unreachable|network is down|system error|network error": "the link between the "
    "nodes is down, or a firewall closed it",
}


def of_collective(fault: Exception, rank: int, peers: list[Peer], seconds: float) -> str | None:
    """The sentence for a collective of ``rank`` that failed; None if it is another kind of fault.

    ``peers`` are all processes in the order of ranks (empty: not known yet), ``seconds`` is
    ``--dist-timeout``.
    """
    text = re.sub(r"^\[\S+:\d+\] ", "", " ".join(str(fault).split()))  # gloo: a line of its source
    # An errno means a file or a socket of Python's own, not a collective.
    is_timeout = isinstance(fault, TimeoutError) and fault.errno is None
    if not (is_timeout or isinstance(fault, dist.DistError) or _FAILURE.search(text)):
        return None
    cause = "the communication failed"
    for pattern, words in _CAUSES.items():
        if re.search(pattern, text, re.IGNORECASE):
            cause = words.format(seconds=seconds)
            break
    me = f"rank {rank}" + (f" of {len(peers)} on {peers[rank].node}" if peers else "")
    return (
        f"{me} lost touch with {_who(text, rank, peers)}: {cause}; look for the first error of the "
        f"other ranks, then continue with --resume ({text[:200]})"
    )


def _who(text: str, rank: int, peers: list[Peer]) -> str:
    """The peer that an error's text is about; a list where its address has several processes."""
    others = [other for other in range(len(peers)) if other != rank]
    found = _ADDRESS.search(text)
    there = [other for other in others if found and peers[other].address == found[1]]
    likely = there or others
    if not likely or len(likely) > 8:
        return "another process of the job"
    if len(likely) == 1:
        (one,) = likely
        address = peers[one].address
        return f"rank {one} on {peers[one].node}" + (f", {address}" if address else "")
    nodes = ", ".join(dict.fromkeys(peers[other].node for other in likely))
    return f"one of the ranks {', '.join(map(str, likely))} on {nodes}"
