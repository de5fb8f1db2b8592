"""Several nodes on one machine: namespaces with a network, host name and processes of their own.

    with Nodes(2) as nodes:
        nodes[1].run("python3 -c 'import socket; print(socket.gethostname())'").out

Each node is a set of Linux namespaces (network, host name, mounts, processes, IPC) whose interface
eth0 is connected to a bridge in a namespace of its own. All of it belongs to a few processes that
die with the test process, however that ends: nothing of it has a name on the machine, and nothing
can be left behind. The nodes share the file system, except /run and /dev/shm, /etc/hosts and
/etc/ssh/ssh_config.

Needs root, and Debian's packages iproute2, for start_sshd() openssh-server, and for block_ports()
nftables. If one is missing, the test is skipped and says so.
"""

import contextlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest
from bench.namespaces import Namespaces, address, children, do, make_bridge, plug_in
from conftest import COMMON, ROOT, Result, activated
from joined import Forked
from running import Process, Running, eventually, everyone

from utils.start.errors import UserError

_NAMESPACES = ("--net", "--uts", "--mount", "--pid", "--ipc")
# Code that moves a process into the namespaces of another one. Its child is in that of processes.
_ENTER = """
import ctypes, os
kinds = [os.open(f"/proc/{first}/ns/{kind}", os.O_RDONLY) for kind in "net uts ipc mnt pid".split()]
assert not any(ctypes.CDLL(None).setns(kind, 0) for kind in kinds)
[os.close(kind) for kind in kinds]
os.chdir(here)
if child := os.fork():
    os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def need(*programs: str) -> None:
    """Skip the test unless this is root on Linux and all programs are installed."""
    if os.geteuid() != 0:
        pytest.skip("several nodes on one machine (network namespaces) need root")
    for program in ("unshare", "nsenter", "setpriv", "ip", *programs):
        if not shutil.which(program, path=activated()["PATH"]):
            pytest.skip(f"{program} is missing: see tests/nodes.py")


def spaces(*kinds: str) -> Namespaces:
    """Namespaces of these kinds; the test is skipped where they are not allowed."""
    try:
        return Namespaces(kinds)
    except UserError as error:
        pytest.skip(str(error))


class Node:
    """A machine, as programs see it: with its own address, host name, firewall and sshd."""

    def __init__(self, number: int, switch: Namespaces, folder: Path):
        self.name, self.ip = f"node{number}", address(number)
        self.number, self.switch, self.folder = number, switch, folder / self.name
        self.folder.mkdir()
        self.port = 2200 + number  # of its sshd
        self.files: dict[str, str] = {}  # that it has its own versions of
        self.spaces = spaces(*_NAMESPACES)

    def set_up(self) -> None:
        """Plug the node in, and give it its name, address and private folders."""
        plug_in(self.number, self.spaces, self.switch)
        script = f"""
            hostname {self.name}
            mkdir -p {self.folder}/cgroup
            mount --rbind /sys/fs/cgroup {self.folder}/cgroup
            mount -t sysfs sysfs /sys
            mount --rbind {self.folder}/cgroup /sys/fs/cgroup
            umount --lazy {self.folder}/cgroup
            mount -t tmpfs tmpfs /run
            mkdir -p /run/sshd /run/lock
            mount -t tmpfs tmpfs /dev/shm
        """
        do(*self.spaces.enter, "bash", "-ec", script)

    def kill(self) -> None:
        """Switch the node off: nothing in it has time to say goodbye to the others."""
        # The cable first, as connections that nobody answers would keep the network for minutes.
        do(*self.switch.enter, "ip", "link", "delete", f"port{self.number}")
        self.spaces.close()

    def start_again(self) -> None:
        """Boot a node that was killed; its sshd is not started."""
        self.spaces = spaces(*_NAMESPACES)
        self.set_up()
        for path, text in self.files.items():
            self.replace(path, text)

    def replace(self, path: str, text: str) -> None:
        """Give this node another version of an existing file (such as /etc/hosts)."""
        own = self.folder / path.strip("/").replace("/", "_")
        own.write_text(text)
        self.files[path] = text
        do(*self.spaces.enter, "mount", "--bind", str(own), path)

    def popen(self, command: str | list[str], env=None, cwd=ROOT, **how) -> subprocess.Popen:
        """Start a command (if it is a text, in bash) inside.

        ``env``: changes to `conftest.activated`. The command gets a session of its own, as if at a
        terminal of its own; the exit code of this Popen is that of the command.
        """
        line = ["bash", "-c", command] if isinstance(command, str) else command
        # setsid: a signal to its process group must spare nsenter, which waits for it.
        # env -C: in another mount namespace nsenter starts at the root.
        first = [*self.spaces.enter, "setsid", "env", "-C", str(cwd)]
        return subprocess.Popen([*first, *map(str, line)], env=activated(**(env or {})), **how)

    def run(self, command: str | list[str], env=None, cwd=ROOT) -> Result:
        """Run a command inside, wait for it, and return its exit code, output and error output."""
        with Typed(self, command, cwd, **(env or {})) as running:
            return running.result()

    def type(self, command: str | list[str], **env: str) -> "Typed":
        """Start a command inside whose lines can be waited for; see `running.Running`."""
        return Typed(self, command, ROOT, **env)

    def fork(self, script: str, *words: object, **env: str) -> Running:
        """Start a script in a fork of `joined`'s server that moves here, after ``BEFORE``."""
        text = f"first, here = {self.spaces.first}, {str(ROOT)!r}\n{_ENTER}{env.pop('BEFORE', '')}"
        running = Forked(script, *words, BEFORE=text, **env)
        outside = running.process
        assert eventually(lambda: children(outside.pid) or outside.poll() is not None)
        running.pid = (children(outside.pid) or [outside.pid])[0]
        return running

    def processes(self) -> set[Process]:
        """What lives in here, except what belongs to the node itself: its first program, sshd."""
        own = ("sleep infinity", "sshd: ", "/usr/sbin/sshd", "nsenter ")
        space, processes = os.readlink(f"/proc/{self.spaces.first}/ns/pid"), set()
        for one in everyone():
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/{one.pid}/ns/pid") == space:
                    processes.add(one)
        return {one for one in processes if one.lives() and not one.command.startswith(own)}

    def link(self, up: bool) -> None:
        """Plug the network cable in or out, without either side noticing."""
        plug = ("master", "bridge") if up else ("nomaster",)
        do(*self.switch.enter, "ip", "link", "set", f"port{self.number}", "up", *plug)

    def block_ports(self, ports: str) -> None:
        """Drop new TCP connections from outside to ``ports`` ("8888", "1024-8887, 8889-65535")."""
        need("nft")
        new = f'iifname "eth0" tcp flags & (syn | ack) == syn tcp dport {{ {ports} }} drop'
        hook = "type filter hook input priority 0"
        rules = f"table inet tests {{\n chain input {{\n {hook}\n {new}\n }}\n }}\n"
        do(*self.spaces.enter, "nft", rules)

    def start_sshd(self, **env: str) -> None:
        """Let root in with the key in ssh_config; logins find the variables ``env`` set."""
        need("sshd")
        config, key = self.folder / "sshd_config", self.folder.parent / "key"
        given = " ".join(f'"{name}={value}"' for name, value in (COMMON | env).items())
        config.write_text(
            f"Port {self.port}\nHostKey {key}\nPidFile none\nUsePAM no\nStrictModes no\n"
            f"PermitRootLogin prohibit-password\nLogLevel ERROR\n"
            f"AuthorizedKeysFile {key}.pub\nSetEnv {given}\n"
        )
        command = ["setsid", "/usr/sbin/sshd", "-f", str(config), "-E", f"{self.folder}/sshd_log"]
        do(*self.spaces.enter, *command)


class Typed(Running):
    """A command typed at a node's terminal; it ends, at the latest, with the node."""

    def __init__(self, node: Node, command: str | list[str], cwd: Path, **env: str):
        super().__init__(node, command, cwd, **env)
        outside = self.process
        assert eventually(lambda: children(outside.pid) or outside.poll() is not None)
        self.pid = (children(outside.pid) or [outside.pid])[0]

    def launch(self, node: Node, command: str | list[str], cwd: Path, **env: str) -> Any:
        """Start the command."""
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": self.errors}
        return node.popen(command, env, cwd, text=True, **pipes)


def type_on_each(nodes: list[Node], line: str, **env: str) -> list[Result]:
    """Type the line on every node, with {rank}, {n} and {ip} of node 0 filled in; how they end."""
    with contextlib.ExitStack() as stack:
        commands = []
        for rank, node in enumerate(nodes):
            command = line.format(rank=rank, n=len(nodes), ip=nodes[0].ip)
            commands.append(stack.enter_context(node.type(command, **env)))
        return [one.result() for one in commands]


class Nodes:
    """``count`` nodes named node0, node1, ... that reach each other; a list of `Node` in ``with``.

    Each node's /etc/ssh/ssh_config lets root in, by name, at nodes after `Node.start_sshd`.
    """

    def __init__(self, count: int):
        self.count = count

    def __enter__(self) -> list[Node]:
        need()
        with contextlib.ExitStack() as stack:
            self.folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="nodes")))
            switch = spaces("--net")
            stack.callback(switch.close)
            make_bridge(switch)
            nodes = []
            for number in range(self.count):
                nodes.append(Node(number, switch, self.folder))
                stack.callback(lambda node=nodes[-1]: node.spaces.close())
                nodes[-1].set_up()
            hosts = "127.0.0.1 localhost\n" + "".join(f"{n.ip} {n.name}\n" for n in nodes)
            for node in nodes:
                node.replace("/etc/hosts", hosts)
            self._configure_ssh(nodes)
            self.nodes, self.stack = nodes, stack.pop_all()
        return nodes

    def __exit__(self, *_: object) -> None:
        for node in self.nodes:
            node.spaces.keeper.kill()  # all at once, as the kernel takes seconds for each
        self.stack.close()

    def _configure_ssh(self, nodes: list[Node]) -> None:
        system = "/etc/ssh/ssh_config"
        if not shutil.which("ssh-keygen") or not Path(system).exists():
            return  # start_sshd() will say what is missing
        key = self.folder / "key"
        do("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key))
        text = "".join(
            f"Host {node.name}\n  HostName {node.ip}\n  Port {node.port}\n" for node in nodes
        )
        text += (
            f"Host *\n  User root\n  IdentityFile {key}\n  IdentitiesOnly yes\n  LogLevel ERROR\n"
            "  StrictHostKeyChecking no\n  UserKnownHostsFile /dev/null\n"
        )
        for node in nodes:
            node.replace(system, text)
