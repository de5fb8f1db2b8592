"""The part of apex.amp that scripts call; `overflow_next` makes the next step overflow."""

from contextlib import contextmanager

import torch

import apex

_scaler = {"loss_scale": 65536.0, "unskipped": 0}
overflow_next = False


def initialize(model, optimizer, opt_level="O1", **changes):
    apex.calls.append(("initialize", opt_level, changes))
    masters = optimizer._masters = {}

    def lazy_init():
        """As in Apex, masters come into being with the first backward."""
        for group in optimizer.param_groups if not masters else ():
            for i, weight in enumerate(group["params"]):
                master = group["params"][i] = torch.nn.Parameter(weight.detach().clone())
                masters[master] = weight
                if weight in optimizer.state:
                    optimizer.state[master] = optimizer.state.pop(weight)

    forward, step = model.forward, optimizer.step
    model.forward = lambda images: forward(images.float())

    def new_step():
        apex.calls.append(("skip" if optimizer._skip else "step",))
        if optimizer._skip:
            return
        step()
        with torch.no_grad():
            for master, weight in masters.items():
                weight.copy_(master)

    def new_zero_grad():
        apex.calls.append(("zero_grad",))
        for master, weight in masters.items():
            master.grad = weight.grad = None

    optimizer._amp_lazy_init, optimizer._skip = lazy_init, False
    optimizer.step, optimizer.zero_grad = new_step, new_zero_grad
    return model, optimizer


@contextmanager
def scale_loss(loss, optimizer, delay_unscale=False):
    global overflow_next
    apex.calls.append(("scale_loss", delay_unscale))
    optimizer._amp_lazy_init()
    yield loss * _scaler["loss_scale"]
    if delay_unscale:
        return
    for master, weight in optimizer._masters.items():
        master.grad = None if weight.grad is None else weight.grad / _scaler["loss_scale"]
    optimizer._skip, overflow_next = overflow_next, False
    if optimizer._skip:
        _scaler.update(loss_scale=_scaler["loss_scale"] / 2, unskipped=0)
    else:
        _scaler["unskipped"] += 1


def master_params(optimizer):
    for group in optimizer.param_groups:
        yield from group["params"]


def state_dict():
    return {"loss_scaler0": dict(_scaler)}


def load_state_dict(state):
    apex.calls.append(("load_state_dict", state))
    _scaler.update(state["loss_scaler0"])
