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
        self.dynamic = fixed is None
        self.value = torch.tensor(self.FIRST if fixed is None else fixed, device=device)
        self.clean_steps = torch.tensor(0, dtype=torch.int32, device=device)
        self.overflow = torch.tensor(0.0, device=device)
        self.skipped = torch.tensor(0.0, dtype=torch.float64, device=device)
        self.reports = reports
        self.lost = False
        self._in_a_row = 0
        self._on_the_way: deque[tuple[Tensor, Any]] = deque()

    def scale(self, loss: Tensor) -> Tensor:
        """The loss (float32 scalar) times the scale."""
        return loss * self.value

    def unscale(self, gradients: list[Tensor]) -> None:
        """Divide ``gradients`` by the scale in place and note whether any is not finite."""
        self.overflow.zero_()
        for dtype in {gradient.dtype for gradient in gradients}:
            alike = [gradient for gradient in gradients if gradient.dtype == dtype]
            torch._amp_foreach_non_finite_check_and_unscale_(
                alike, self.overflow, self.value.reciprocal()
            )

    def prepare(self, optimizer: torch.optim.Optimizer) -> None:
        """Let ``optimizer.step()`` do nothing after an overflow.

        A fused optimiser reads the flag on the device; any other one costs a host-device sync.
        """
        if getattr(optimizer, "_step_supports_amp_scaling", False):
            optimizer.grad_scale, optimizer.found_inf = None, self.overflow
        elif bool(self.overflow):
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None

    def update(self) -> None:
        """Count the step, and move a dynamic scale."""
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
        self._on_the_way.append((seen, event))
        while self._on_the_way:
            seen, event = self._on_the_way[0]
            if event is not None and not event.query():
                return
            self._on_the_way.popleft()
            self._note(*seen.tolist())

    def _note(self, overflow: float, scale: float) -> None:
        self._in_a_row = self._in_a_row + 1 if overflow else 0
        self.lost = scale < SMALLEST if self.dynamic else self._in_a_row >= ENDLESS
        if overflow and self.reports:
            change = (
                f"reducing loss scale to {scale}" if self.dynamic else f"scale {scale} is fixed"
            )
            log.info(f"Gradient overflow.  Skipping step, loss scaler 0 {change}")

    def state_dict(self) -> dict[str, float]:
        """Scale, clean steps in a row, and skipped steps. Waits for the device."""
        return {
            "scale": float(self.value),
            "clean_steps": int(self.clean_steps),
            "skipped": int(self.skipped),
        }

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restore a `state_dict`; a fixed scale stays as it is."""
        self.skipped.fill_(state["skipped"])
        if self.dynamic:
            self.value.fill_(state["scale"])
            self.clean_steps.fill_(int(state["clean_steps"]))
