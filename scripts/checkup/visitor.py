"""How another node visits node 0 on the master port and answers its questions; see `meeting`.

Standard library only.
"""

import socket
import time

from checkup import message_shapes as shapes
from checkup.meeting import GREETING_BYTES, PATIENCE, Handlers, NoMeeting, answer
from checkup.message_shapes import Protocol
from checkup.messages import Message, notice_death, receive, send


def visit(master: str, port: int, me: Message, seconds: float, protocol: Protocol) -> socket.socket:
    """Connect to node 0 as ``me`` (rank, nodes, host); try again until ``seconds`` have passed.

    Raises: `NoMeeting`, which says why that failed.
    """
    deadline = time.monotonic() + seconds
    there = f"the master {master}:{port}"
    while True:
        rest = max(deadline - time.monotonic(), 0.1)
        try:
            link = socket.create_connection((master, port), timeout=min(rest, 5.0))
            break
        except socket.gaierror as fault:
            raise NoMeeting(
                "master-name",
                f"the master's name {master} cannot be resolved here ({fault.strerror})",
                "give node 0's IP address as --master, or add the name to /etc/hosts",
            ) from None
        except TimeoutError:
            reason = "no answer"
            remedy = (
                "open the port in the firewall or security group of node 0, and check the address"
            )
        except ConnectionRefusedError:
            reason = "connection refused"
            remedy = (
                "start it on node 0 as well, and check that --master is node 0's address "
                "and that its firewall lets the port through"
            )
        except OSError as fault:
            reason, remedy = fault.strerror or str(fault), "check --master and the network"
        if time.monotonic() >= deadline:
            raise NoMeeting(
                "master-port", f"{there} cannot be reached after {seconds:g} s ({reason})", remedy
            )
        time.sleep(0.2)
    try:
        send(link, me | {"greeting": protocol.greeting})
        reply = receive(link, GREETING_BYTES, PATIENCE)
        if reply == {"do": "clock"}:
            send(link, {"time": time.time()})
            reply = receive(link, GREETING_BYTES, PATIENCE)
        shapes.check(reply, shapes.WELCOME, "the reply")
    except (OSError, ValueError):
        link.close()
        raise NoMeeting(
            "master-port",
            f"something answers at {there}, but it is not {protocol.name}",
            "end what uses the port (a training still running?), or choose another --port",
        ) from None
    if "refused" in reply:
        link.close()
        raise NoMeeting(
            "master-port",
            f"node 0 refuses this node: {reply['refused']}",
            f"correct it and {protocol.again}",
        )
    link.settimeout(None)
    notice_death(link)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return link


def serve(link: socket.socket, handlers: Handlers, protocol: Protocol) -> Message:
    """Answer node 0's requests until it says "end"; return that message.

    Raises: `NoMeeting` if node 0 disappears before.
    """
    try:
        while (do := protocol.check_request(request := receive(link))) != "end":
            send(link, answer(handlers, do, request))
    except (OSError, ValueError) as fault:
        raise NoMeeting(
            "lost",
            f"lost touch with node 0 in the middle of the meeting ({fault})",
            "look at what it has printed there",
        ) from None
    finally:
        link.close()
    return request
