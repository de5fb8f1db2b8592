"""torchrun for scripts/launch.sh: the same options, but a better exit code and time for snapshots.

- It exits with the code of the process that failed first, not of one that lost its peer, and the
  last line is that error. torchrun itself exits with 1 and a traceback of fifty lines.
- After SIGTERM or Ctrl-C it waits until the training processes have written their snapshot, and
  restarts none. torchrun would kill them after 30 s. A second Ctrl-C kills them.
"""

import contextlib
import logging
import os
import signal
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from utils import errors
from utils.errors import BAD_INPUT, LOST_PEER, UserError
from utils.launch import job_exit_code, shell_exit_code

signals: list[int] = []  # received by this process
codes: list[int] = []  # exit codes of the training processes, after a signal


def main() -> int:
    from torch.distributed import run  # takes seconds
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError

    def end(signum: int, frame: Any) -> None:
        """Ask the training processes to end, and wait for them; torchrun then cleans up."""
        signals.append(signum)
        task = Path(f"/proc/self/task/{os.getpid()}/children")
        # Training processes have their own sessions; the tee of launch.sh is in this one.
        children = [pid for pid in map(int, task.read_text().split()) if os.getsid(pid) == pid]
        for pid in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL if signals.count(signal.SIGINT) > 1 else signal.SIGTERM)
        if len(signals) > 1:
            return  # the handler of the first signal is still waiting
        for pid in children:
            with contextlib.suppress(ChildProcessError):  # WNOWAIT: torchrun collects it
                done = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
                codes.append(done.si_status * (1 if done.si_code == os.CLD_EXITED else -1))
        raise SignalException("", signal.Signals(signum))

    logging.disable()  # torchrun's log: the training processes report errors themselves
    args = run.parse_args(None)
    args.signals_to_handle = "SIGQUIT"  # not those that `end` handles
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, end)
    try:
        run.run(args)
    except ChildFailedError as failed:
        # Processes that ended later were stopped by torchrun because of the first failure.
        latest = failed.get_first_failure()[1].timestamp + 1  # in whole seconds
        ended = [one for one in failed.failures.values() if one.timestamp <= latest]
        return shell_exit_code(job_exit_code([one.exitcode for one in ended]))
    except SignalException:
        if signals.count(signal.SIGINT) > 1:
            return 128 + signal.SIGINT
        failed = [code for code in codes if code]
        if not codes:
            raise UserError("interrupted before training began", code=128 + signals[0]) from None
        return shell_exit_code(BAD_INPUT if BAD_INPUT in codes else max(failed, default=0))
    except (RuntimeError, RendezvousError) as error:
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        text = f"torchrun could not meet the other nodes: {first}"
        raise UserError(text, code=LOST_PEER) from None
    return 0


if __name__ == "__main__":
    errors.exit_with(main)
