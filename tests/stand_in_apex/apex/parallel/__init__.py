"""The part of apex.parallel that scripts use, of one process."""

import torch

import apex


def convert_syncbn_model(model):
    apex.calls.append(("convert_syncbn_model",))
    return model


class DistributedDataParallel(torch.nn.Module):
    def __init__(self, module, **options):
        super().__init__()
        apex.calls.append(("DistributedDataParallel", options))
        self.module = module

    def forward(self, *inputs):
        return self.module(*inputs)

    def disable_allreduce(self):
        apex.calls.append(("disable_allreduce",))

    def enable_allreduce(self):
        apex.calls.append(("enable_allreduce",))
