"""torchrun for the wrappers: the same options, but a better exit code and time for snapshots.

- It exits with the code of the process that failed first, not of one that lost its peer, and the
  last line is that error. torchrun itself exits with 1 and a traceback of fifty lines.
- After SIGTERM or Ctrl-C it waits until the training processes have written their snapshot, and
  restarts none. torchrun would kill them after 30 s. A second Ctrl-C kills them.
- With --max_restarts, elastic_agent.py decides which failures are worth a restart.
- --nproc_per_node=gpu means one process on a machine without GPUs.
- Over ssh, the nodes check each other first. The variable IMAGENET_ALL_UP says how:
  "NODE_RANK NODES HOST:PORT" of the pre-flight check.
"""

import argparse
import contextlib
import logging
import os
import signal
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from utils.start import errors, known_errors, signals
from utils.start.addresses import parse_tcp_url
from utils.start.cores import usable_cores
from utils.start.errors import BAD_INPUT, LOST_PEER, UserError
from utils.start.launch import shell_exit_code
from utils.start.option_types import Parser, seconds

received: list[int] = []  # signals
codes: list[int] = []  # exit codes of the training processes, after a signal


def main() -> int:
    import elastic_agent  # takes seconds, as torch does
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousError

    def end(signum: int, frame: Any) -> None:
        """Ask the training processes to end, and wait for them; torchrun then cleans up."""
        received.append(signum)
        task = Path(f"/proc/self/task/{os.getpid()}/children")
        # Training processes have their own sessions; the tee of launch.sh is in this one.
        children = [pid for pid in map(int, task.read_text().split()) if os.getsid(pid) == pid]
        kills = received.count(signal.SIGINT) > 1
        for pid in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL if kills else signal.SIGTERM)
        if len(received) > 1:
            return  # the handler of the first signal is still waiting
        for pid in children:
            with contextlib.suppress(ChildProcessError):  # WNOWAIT: torchrun collects it
                if done := os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT):
                    codes.append(done.si_status * (1 if done.si_code == os.CLD_EXITED else -1))
        raise SignalException("", signal.Signals(signum))

    logging.disable()  # torchrun's log: the training processes report errors themselves
    args = run.parse_args(None)
    args.signals_to_handle = "SIGQUIT"  # not those that `end` handles
    signals.handle(end, (signal.SIGTERM, signal.SIGINT, signal.SIGHUP))
    signals.start_is_over()
    try:
        prepare(args)
        if args.max_restarts:
            elastic_agent.use(*parse_tcp_url(f"tcp://{args.rdzv_endpoint}", "--rdzv_endpoint"))
        run.run(args)
    except elastic_agent.BadInput:
        return BAD_INPUT  # the training process has said why
    except (ChildFailedError, SignalException) as error:
        if isinstance(error, ChildFailedError) and not received:
            return shell_exit_code(elastic_agent.first_code(error.failures.values()))
        # Python drops what a handler raises in some places. Then torchrun sees what ended instead.
        if received.count(signal.SIGINT) > 1:
            return 128 + signal.SIGINT
        # Processes that a signal kills had not yet installed their handlers.
        failed = {*codes} - {0, -signal.SIGTERM}
        if not failed and (not codes or -signal.SIGTERM in codes):
            return signals.say(received[0])
        return shell_exit_code(BAD_INPUT if BAD_INPUT in codes else max(failed, default=0))
    except RendezvousClosedError:
        raise UserError("another node has ended this job", code=LOST_PEER) from None
    except (RuntimeError, RendezvousError) as error:
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        text = (
            f"torchrun could not meet the other nodes ({first}): look at what they have printed, "
        )
        raise UserError(text + "then start all of them again", code=LOST_PEER) from None
    return 0


def prepare(args: argparse.Namespace) -> None:
    """Choose the number of processes and threads, and run the pre-flight check where it is asked
    for. ``args``: of torchrun. Raises: `UserError`."""
    if args.nproc_per_node == "gpu":
        import torch

        args.nproc_per_node = str(max(1, torch.cuda.device_count()))
    if args.nproc_per_node.isdecimal():
        # torchrun's default is one thread. Threads that spin at barriers slow down loader workers.
        threads = usable_cores() // int(args.nproc_per_node)
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, threads)))
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    wait = Parser(add_help=False, allow_abbrev=False)
    wait.add_argument("--dist-timeout", type=seconds, default=300.0)
    limit = wait.parse_known_args(args.training_script_args)[0].dist_timeout
    if args.rdzv_backend == "static" and not args.rdzv_conf:
        # A node may have ended since the check, while it imported torch. torchrun waits for ten
        # minutes, without a word; but the import may take a minute longer on another node.
        args.rdzv_conf = f"timeout={max(60, round(limit))}"
    rank, nodes, address = os.environ.get("IMAGENET_ALL_UP", "0 1 -").split()
    if int(nodes) > 1:
        from utils.start import preflight

        master, processes = parse_tcp_url(f"tcp://{address}"), int(args.nproc_per_node)
        preflight.meet(int(rank), int(nodes), processes, master, limit)


def run_until_stopped() -> int:
    """`main`; a signal that comes before it handles signals, or a missing torch, is one line."""
    signals.stop_during_start()
    try:
        return main()
    except signals.Stopped as stop:
        return signals.say(stop.signum)
    except ModuleNotFoundError as error:
        raise known_errors.explain(error) or error from None


if __name__ == "__main__":
    errors.exit_with(run_until_stopped)
