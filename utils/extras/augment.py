"""``--auto-augment`` and ``--random-erasing``, by torchvision's v2 transforms on uint8 crops.

Interface: `build` makes `utils.images.ImageBatches.augment`, a function of each training crop.
Without this file, training crops are only resized and mirrored.
"""

from collections.abc import Callable

from torch import Tensor
from torchvision.transforms import v2

POLICIES = {
    "ra": v2.RandAugment,  # Cubuk et al. 2020, arXiv:1909.13719
    "ta_wide": v2.TrivialAugmentWide,  # Mueller and Hutter 2021, arXiv:2103.10158
    "aa": v2.AutoAugment,  # Cubuk et al. 2019, arXiv:1805.09501
    "augmix": v2.AugMix,  # Hendrycks et al. 2020, arXiv:1912.02781
}
GREY = [124, 116, 104]  # ImageNet's mean colour: 0 after normalisation


def build(policy: str | None, erasing: float) -> Callable[[Tensor], Tensor]:
    """The transform of a crop, uint8 [3, h, w] to the same.

    ``policy`` is a key of `POLICIES` or None; ``erasing`` the probability of a grey box (Zhong et
    al. 2020, arXiv:1708.04896).
    """
    steps = [POLICIES[policy]()] if policy else []
    steps += [v2.RandomErasing(p=erasing, value=GREY)] if erasing else []
    return v2.Compose(steps)
