"""When a collective fails, name the process that was lost and the likely reason.

- Used by jobs with several processes after communication has failed.
- Interface: `explain`, which `utils.start.world.process_group` calls.
"""

import re

from utils.start import errors

# Words in the errors of gloo, NCCL and the store when another process is gone or hangs.
MESSAGES = (
    "gloo|nccl|connection (reset|closed|refused)|broken pipe|timed out|"
    "timeout caused pair closure|connectfullmesh failed|socket closed|remote process exited"
)
CAUSES = {
    "timed out|timeout": "no answer within {seconds:g} s (--dist-timeout): that process hangs, or "
    "its machine or the link to it is down",
    "cuda error|out of memory": "CUDA failed in this process, or its memory is full",
    "": "that process has ended or was killed, or its machine or the link to it is down",
}


def explain(
    error: Exception, rank: int, processes: list[tuple[str, str | None]], seconds: float
) -> str:
    """Return an error message for the ``error`` that a collective raised in ``rank``.

    ``processes``: for each rank, its node's name and the address at which others reach it (empty if
    not known yet). ``seconds``: the value of ``--dist-timeout``.
    """
    text = re.sub(r"^\[\S+:\d+\] ", "", " ".join(str(error).split()))  # gloo's file and line
    why = next(why for words, why in CAUSES.items() if re.search(words, text.lower()))
    others = [other for other in range(len(processes)) if other != rank]
    # gloo's messages contain the address of the lost process.
    likely = [other for other in others if f"[{processes[other][1]}]:" in text] or others
    nodes = ", ".join(dict.fromkeys(processes[other][0] for other in likely))
    if not likely or len(likely) > 8:
        who = "another process of the job"
    elif len(likely) == 1:
        who = f"rank {likely[0]} on {nodes}, {processes[likely[0]][1]}"
    else:
        who = f"one of the ranks {', '.join(map(str, likely))} on {nodes}"
    me = f"rank {rank}" + (f" of {len(processes)} on {processes[rank][0]}" if processes else "")
    return (
        f"{me} lost touch with {who}: {why.format(seconds=seconds)}; look for the first error of "
        f"the other ranks, then {errors.how_to_continue} ({text[:200]})"
    )
