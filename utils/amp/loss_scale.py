"""Apex's dynamic loss scale, on the device."""

import logging
from collections import deque
from typing import Any

import torch
from torch import Tensor

log = logging.getLogger(__name__)

SMALLEST = 2.0**-14  # a gradient that float16 cannot hold at this scale is above 10**9
ENDLESS = 40  # skipped steps in a row


class LossScaler:
    """Apex's loss scale: 2**16 at first, halved on overflow, doubled after 2000 clean steps.

    Scale, counters and overflow flag stay on ``device``, so that no step waits for it. ``fixed``:
    a constant scale. ``reports``: log each skipped step as soon as the host sees its flag. ``lost``
    becomes true when steps are skipped without end.
    """

    FIRST, LARGEST, GROWTH_INTERVAL = 2.0**16, 2.0**24, 2000

    def __init__(self, device: torch.device, fixed: float | None = None, reports: bool = True):
        self.dynamic, self.reports = fixed is None, reports
        self.value = torch.tensor(self.FIRST if fixed is None else fixed, device=device)
        self.clean_steps = torch.tensor(0, dtype=torch.int32, device=device)
        self.overflow = torch.tensor(0.0, device=device)
        self.skipped = torch.tensor(0.0, dtype=torch.float64, device=device)
        self.lost, self.in_a_row = False, 0
        self.pending: deque[tuple[Tensor, Any]] = deque()

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the optimiser's gradients by the scale, and move a dynamic scale.

        If a gradient is not finite, the optimiser's next step does nothing.
        """
        weights = [weight for group in optimizer.param_groups for weight in group["params"]]
        weights = [weight for weight in weights if weight.grad is not None]
        self.overflow.zero_()
        for dtype in {weight.dtype for weight in weights}:
            gradients = [weight.grad for weight in weights if weight.dtype == dtype]
            inverse = self.value.reciprocal()
            torch._amp_foreach_non_finite_check_and_unscale_(gradients, self.overflow, inverse)
        if getattr(optimizer, "_step_supports_amp_scaling", False):
            optimizer.found_inf = self.overflow  # a fused optimiser reads it on the device
        elif bool(self.overflow):  # any other one costs a host-device sync
            for weight in weights:
                weight.grad = None
        self.skipped += self.overflow
        if self.dynamic:
            torch._amp_update_scale_(
                self.value, self.clean_steps, self.overflow, 2.0, 0.5, self.GROWTH_INTERVAL
            )
            self.value.clamp_(max=self.LARGEST)
        self._watch()

    def _watch(self) -> None:
        """Copy flag and scale to the host, and read those of earlier steps that have arrived."""
        seen, event = torch.stack((self.overflow, self.value)).to("cpu", non_blocking=True), None
        if self.value.is_cuda:
            event = torch.cuda.Event()
            event.record()
        self.pending.append((seen, event))
        while self.pending:
            seen, event = self.pending[0]
            if event is not None and not event.query():
                return
            self.pending.popleft()
            overflow, scale = seen.tolist()
            self.in_a_row = self.in_a_row + 1 if overflow else 0
            self.lost = scale < SMALLEST if self.dynamic else self.in_a_row >= ENDLESS
            if overflow and self.reports:
                change = f"reducing loss scale to {scale}" if self.dynamic else f"scale {scale}"
                log.info(f"Gradient overflow.  Skipping step, loss scaler 0 {change}")

    def state_dict(self) -> dict[str, float]:
        """Scale, clean steps in a row, and skipped steps. Waits for the device."""
        names = ("value", "clean_steps", "skipped")
        scale, clean, skipped = (getattr(self, name).item() for name in names)
        return {"scale": scale, "clean_steps": clean, "skipped": int(skipped)}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restore a `state_dict`; a fixed scale stays as it is."""
        self.skipped.fill_(state["skipped"])
        if self.dynamic:
            self.value.fill_(state["scale"])
            self.clean_steps.fill_(int(state["clean_steps"]))
