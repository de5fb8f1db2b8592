"""What a GPU will need of the input path, by its name and the model's size."""

# Images/s of ResNet-50 training with mixed precision on one GPU, from published figures and, for
# T4 and H100, estimates from them; what a GPU of that name asks of the input path.
RESNET50_IMAGES_PER_S = {"T4": 400, "V100": 1200, "A100": 2470, "H100": 4900, "H200": 4900}
RESNET50_GFLOPS = 4.09  # forward, one image of 224 x 224


def assumed_need(gpu: str, gflops: float | None) -> float | None:
    """Images/s that a model of ``gflops`` (forward, one image) trains at on ``gpu``; None: unknown.

    Other models are put to ResNet-50 by their number of operations.
    """
    words = gpu.replace("-", " ").split()
    known = [rate for name, rate in RESNET50_IMAGES_PER_S.items() if name in words]
    return known[0] * RESNET50_GFLOPS / gflops if known and gflops else None
