"""What the curve of a study teaches: a forecast of the arms to come, and what limits them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from forecast import buckets, measured, scaling
from forecast.measured import MeasuredRun
from forecast.scaling import Cluster, Workload
from study.outcome import Outcome, count

from utils.comm import methods
from utils.comm.methods import Method
from utils.errors import UserError

FASTEST_GBIT = 100.0  # the fit looks for a link between this and a thousandth of it
LITTLE = 0.05  # of a step


@dataclass(frozen=True)
class Point:
    """Images/s on so many nodes: forecast and measured; ``fitted``: the model was fitted to it."""

    nodes: int
    forecast: float
    measured: float | None
    fitted: bool


@dataclass(frozen=True)
class Curve:
    """The forecast for one curve, fitted to the arms with the fewest nodes."""

    points: list[Point]
    network: str  # what the link between nodes behaves like, as all-reduce gets it
    sentences: list[str]


def fit(outcomes: Sequence[Outcome], nodes: Sequence[int], weak: bool) -> Curve | None:
    """The curve of finished arms (one per number of nodes), for all ``nodes`` of the study.

    ``weak``: the batch per process stays the same. None before two arms have ended. Raises:
    `UserError` where no forecast is possible, with the reason.
    """
    done = sorted((one for one in outcomes if one.is_finished), key=lambda one: one.nodes)
    if len(done) < 2:
        return None
    runs = [measured.read_run(one.folder) for one in done]
    base, second, last = runs[0], runs[1], runs[-1]
    per_node = max(1, base.gpus // base.nodes)
    how = _method(done[1])
    work = Workload(base.batch, 1.0, buckets.of(base.arch, base.classes or 1000), how)
    cluster = Cluster(per_node, network_gbit=FASTEST_GBIT, protocol=1.0)
    work = scaling.fit_compute(work, cluster, base.measured)

    def of(count_of_nodes: int) -> scaling.Forecast:
        gpus = count_of_nodes * per_node
        batch = work.batch if weak else work.batch * base.gpus / gpus
        return scaling.forecast(replace(work, batch=batch), cluster, gpus)

    cluster = scaling.fit_network(replace(work, batch=second.batch), cluster, second.measured)
    rates = {run.nodes: run.gpus * run.batch / run.step_s for run in runs}
    fitted = (base.nodes, second.nodes)
    points = [Point(n, of(n).images_per_s, rates.get(n), n in fitted) for n in nodes]
    more = of(last.nodes + 1).images_per_s - of(last.nodes).images_per_s
    alone = rates[base.nodes] / base.nodes
    sentences = [_worth(last.nodes, more, alone), _limits(done[-1], base, last, of(last.nodes))]
    return Curve(points, _network(cluster.network_gbit * cluster.protocol), sentences)


def _network(gbit: float) -> str:
    if gbit < 1.01 * FASTEST_GBIT / 1000:
        return f"not even a network of {FASTEST_GBIT / 1000:g} Gbit/s explains the second of them"
    if gbit > 0.99 * FASTEST_GBIT:
        return f"if the network alone is to blame, it gives {FASTEST_GBIT:g} Gbit/s or more"
    return f"if the network alone is to blame, it gives {gbit:.2g} Gbit/s"


def _method(one: Outcome) -> Method:
    """What gradients are between the nodes: Apex's O2 and O3 have 16 bits."""
    if one.run and str(one.run.facts.get("precision")) in ("O2", "O3"):
        return methods.parse("fp16")
    try:
        return methods.parse(one.summary.get("comm") or "fp32")
    except UserError:
        return methods.parse("fp32")


def _worth(nodes: int, more: float, alone: float) -> str:
    verb = "bring" if more >= 0 else "cost"
    return (
        f"Node {nodes + 1} would {verb} about {abs(more):.3g} images/s, {abs(more) / alone:.0%} of "
        "what the first arm has per node (forecast)."
    )


def shares(base: MeasuredRun, last: MeasuredRun, one: Outcome, model: scaling.Forecast) -> dict:
    """Shares of the largest arm's step that perfect scaling would not have, by their cause."""
    known = {part: one.summary.get(f"{part}_s") for part in ("data", "communication")}
    if None in known.values() or last.compute_s is None or base.compute_s is None:
        raise UserError(f"{one.folder} has not recorded the parts of its steps")
    step = last.step_s
    alone = base.compute_s * last.batch / base.batch
    slower = max(0.0, last.compute_s - alone)
    lag = model.straggler_s / ((model.straggler_s + model.exposed_s) or 1.0)
    found = {
        "network": known["communication"] * (1 - lag) / step,
        "input": known["data"] / step,
        "stragglers": known["communication"] * lag / step,
    }
    found["batch" if last.batch < base.batch else "slower nodes"] = slower / step
    return found


def _limits(one: Outcome, base: MeasuredRun, last: MeasuredRun, model: scaling.Forecast) -> str:
    try:
        found = shares(base, last, one, model)
    except UserError as fault:
        return f"What holds {count(last.nodes, 'node')} back is not known: {fault}."
    cause, share = max(found.items(), key=lambda item: item[1])
    on = count(last.nodes, "node")
    if share < LITTLE:
        return f"Nothing holds {on} back by more than {LITTLE:.0%} of a step."
    words = {
        "network": f"communication that compute does not hide takes {share:.0%} of a step",
        "input": f"waiting for images takes {share:.0%} of a step",
        "stragglers": f"waiting for the slowest process takes about {share:.0%} of a step",
        "batch": f"a smaller batch computes less efficiently, by {share:.0%} of a step",
        "slower nodes": f"computing takes longer than on {count(base.nodes, 'node')}, by "
        f"{share:.0%} of a step",
    }
    return f"What holds {on} back is mostly {cause}: {words[cause]}; {_help(cause, one)}."


def _help(cause: str, one: Outcome) -> str:
    comm = one.option("comm")
    if cause == "network":
        if one.option("opt_level") in ("O0", "O1"):
            return "most likely to help: --opt-level O2, which halves the gradients, or a larger -b"
        if comm not in (None, "auto"):
            return "most likely to help: --comm auto, and a larger -b"
        return "most likely to help: a larger -b, which makes fewer exchanges"
    return {
        "input": "most likely to help: more workers (-j), or a shrunk copy of the images "
        "(scripts/prepare_data.py shrink)",
        "stragglers": "scripts/status.sh names the slow ones during training; most likely to help: "
        "equal nodes, or a larger -b",
        "batch": "most likely to help: a larger --global-batch",
        "slower nodes": "most likely to help: nodes that share nothing (cores, memory, disk), all "
        "alike",
    }[cause]
