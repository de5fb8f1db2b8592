"""The part of apex.parallel that scripts use."""

import torch
import torch.distributed as dist

import apex


def convert_syncbn_model(model):
    apex.calls.append(("convert_syncbn_model",))
    return model


class DistributedDataParallel(torch.nn.Module):
    """All-reduces each gradient as it comes, unless told otherwise."""

    def __init__(self, module, **options):
        super().__init__()
        apex.calls.append(("DistributedDataParallel", options))
        self.module, self.reduces = module, True
        for parameter in module.parameters():
            dist.broadcast(parameter.data, src=0)
            parameter.register_post_accumulate_grad_hook(self._reduce)

    def _reduce(self, parameter):
        if self.reduces:
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()

    def disable_allreduce(self):
        apex.calls.append(("disable_allreduce",))
        self.reduces = False

    def enable_allreduce(self):
        apex.calls.append(("enable_allreduce",))
        self.reduces = True

    def forward(self, *inputs):
        return self.module(*inputs)
