"""Options of the model, its training, precision and gradient exchange. Without torch."""

import argparse

from utils.start import option_types as types

# The optimisers and their default --lr.
USUAL_LR = {"sgd": 0.1, "nesterov": 0.1, "adamw": 1e-3}
# Schedules that depend on the last epoch: a resumed run cannot change --epochs.
TO_THE_END = ("cosine", "linear", "onecycle")
SCHEDULES = ("step", "constant", *TO_THE_END)
COMPILE = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
AMP = ("auto", "fp16", "bf16", "off")
OPT_LEVELS = ("O0", "O1", "O2", "O3")
COMM = ("fp32", "fp16", "bf16", "int8", "int4")  # from most to least exact


def add_options(parser: types.Parser, batch: str) -> None:
    """Add the options of every script. ``batch`` is the help text of ``--batch-size``."""
    _add_model(parser)
    _add_training(parser, batch)
    add = parser.group("speed").add_argument
    text = (
        "compile the training step with torch.compile (not evaluation). reduce-overhead uses CUDA "
        "graphs, for small batches. If you omit the mode, put the option after DATA"
    )
    add("--compile", nargs="?", const="default", choices=COMPILE, help=text)
    text = "memory layout NHWC, which is faster for convolutions"
    add("--channels-last", action=argparse.BooleanOptionalAction, default=True, help=text)
    text = "recompute activations in backward: less memory, one more forward pass, same result"
    add("--activation-checkpointing", action="store_true", help=text)
    text = "print the largest batch per GPU that fits into its memory, and exit"
    add("--find-batch", action="store_true", help=text)
    text = (
        "train on synthetic images, without DATA: as many as ImageNet has (1,281,167; 50,000 for "
        "validation). --train-time ends earlier"
    )
    add("--dummy", action="store_true", help=text)


def _add_model(parser: types.Parser) -> None:
    add = parser.group("model").add_argument
    text = "any classification model of torchvision, or of timm if it is installed"
    add("-a", "--arch", default="resnet18", help=text)
    text = (
        "start from published weights, or from FILE: a checkpoint of this suite, torchvision or "
        "timm, or .safetensors. Images are resized and normalised as the weights expect. The "
        "classifier is new if the classes differ. If you omit FILE, put the option after DATA"
    )
    add(
        "--pretrained",
        nargs="?",
        type=types.path,
        const=True,
        default=False,
        metavar="FILE",
        help=text,
    )
    text = "train only the classifier; also freeze batch-norm statistics"
    add("--freeze", action="store_true", help=text)
    text = (
        "also evaluate an exponential moving average of the weights over about 1/(1-DECAY) steps; "
        "best.pt is the better of the two models. 0.9999 suits long runs, 0.998 short ones"
    )
    add("--ema", type=types.ema_decay, metavar="DECAY", help=text)


def _add_training(parser: types.Parser, batch: str) -> None:
    add = parser.group("training").add_argument
    add("-b", "--batch-size", "--b", type=types.positive, default=128, metavar="N", help=batch)
    add("--epochs", type=types.epochs, default=90, metavar="N", help="total number of epochs")
    add("--start-epoch", type=types.epochs, metavar="N", help="start from this epoch")
    add("--optimizer", choices=tuple(USUAL_LR), default="sgd", help="the optimiser")
    text = "learning rate after warm-up (default: 0.1); with adamw 0.001"
    add("--lr", "--learning-rate", type=types.non_negative, help=text)
    text = "scale --lr with the global batch: linear, lr x batch/256; sqrt, lr x (batch/256)^0.5"
    add("--lr-scaling", choices=("none", "linear", "sqrt"), default="none", help=text)
    text = (
        "step: x0.1 every 30 epochs and once more at 80; constant: --lr in all epochs; cosine, "
        "linear: falling to 0 at the last epoch; onecycle: rising for 30 %% of the epochs, or for "
        "--warmup-epochs, then falling to 0"
    )
    add("--lr-schedule", choices=SCHEDULES, default="step", help=text)
    text = "epochs of linear warm-up from 0"
    add("--warmup-epochs", type=types.non_negative, default=0.0, metavar="N", help=text)
    text = "momentum of sgd and nesterov (default: 0.9)"
    add("--momentum", type=types.fraction, help=text)
    add("--betas", type=types.betas, default="0.9,0.999", metavar="B1,B2", help="betas of adamw")
    text = "weight decay (default: 0.0001); decoupled in adamw (default: 0.05)"
    add("--wd", "--weight-decay", dest="weight_decay", type=types.non_negative, help=text)
    text = "weight decay of norms, biases and position embeddings; 0 is common; default: --wd"
    add("--wd-norm", type=types.non_negative, metavar="D", help=text)
    add("--label-smoothing", type=types.fraction, default=0.0, metavar="E", help="0.1 is common")
    text = "accumulate the gradients of N batches for each step; the global batch grows N times"
    add("--accum-steps", type=types.positive, default=1, metavar="N", help=text)
    text = (
        "images per step over all processes, whatever their number; each takes its part, in "
        "micro-batches of at most -b images. A run keeps its steps and its learning rate when "
        "processes leave or join"
    )
    add("--global-batch", type=types.positive, metavar="N", help=text)
    text = "clip the gradient norm to this limit; 0: off"
    add("--clip-grad", type=types.non_negative, default=0.0, metavar="NORM", help=text)
    add("--seed", type=types.seed, default=0, help="seed of weights, order and augmentation")


def add_amp(parser: types.Parser) -> None:
    """Add ``--amp``, for the scripts that use torch.amp."""
    text = (
        "autocast to fp16 with loss scaling, to bf16, or off (float32); auto: fp16 on a GPU, "
        "bf16 on a CPU with AMX for images of at least 224 pixels, else off"
    )
    parser.group("speed").add_argument("--amp", choices=AMP, default="auto", help=text)


def add_comm(parser: types.Parser) -> None:
    """Add the options of the gradient exchange, for DistributedDataParallel."""
    add = parser.group("speed").add_argument
    text = (
        "format in which gradients are exchanged; scripts/bench_network.py measures which is fast "
        "on your network"
    )
    add("--comm", choices=COMM, default="fp32", help=text)


def add_sharding(parser: types.Parser) -> None:
    """Add ``--reshard``, for FSDP."""
    text = (
        "how long gathered weights stay in memory. full (ZeRO-3): while their block computes; none "
        "(ZeRO-2): until backward, which halves the gathers but needs memory for the whole model; "
        "node: like full, but each node has all shards and sends only gradients to other nodes"
    )
    add = parser.group("speed").add_argument
    add("--reshard", choices=("none", "full", "node"), default="full", help=text)


def add_apex(parser: types.Parser) -> None:
    """Add Apex's options under Apex's names."""
    add = parser.group("Apex mixed precision").add_argument
    text = "O0: float32; O1: autocast; O2: float16 with float32 masters; O3: float16"
    add("--opt-level", choices=OPT_LEVELS, default="O2", help=text)
    text = "batch norm in float32 even if the weights are float16; default: set by --opt-level"
    add("--keep-batchnorm-fp32", choices=("True", "False"), help=text)
    text = "a fixed loss scale, or dynamic; default: set by --opt-level"
    add("--loss-scale", type=_loss_scale, metavar="X|dynamic", help=text)
    text = "apex: NVIDIA's package; torch: the same in plain PyTorch; auto: apex if it is usable"
    add("--amp-impl", choices=("auto", "apex", "torch"), default="auto", help=text)


def _loss_scale(text: str) -> float | str:
    """The type of ``--loss-scale``."""
    return text if text == "dynamic" else types.number(float, 0, exclusive=True)(text)


def set_defaults(args: argparse.Namespace) -> None:
    """Set omitted options whose default depends on ``--optimizer``."""
    if args.lr is None:
        args.lr = USUAL_LR[args.optimizer]
    if args.momentum is None:
        args.momentum = 0.9
    if args.weight_decay is None:
        args.weight_decay = 0.05 if args.optimizer == "adamw" else 1e-4
