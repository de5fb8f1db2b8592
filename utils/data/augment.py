"""``--auto-augment`` and ``--random-erasing``: torchvision's v2 transforms on uint8 crops.

Interface: `build` returns `utils.data.images.ImageBatches.augment`, which is called with each
crop.
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
    """Return the transform of a crop; input and output are uint8 [3, h, w].

    ``policy`` is a key of `POLICIES` or None. ``erasing`` is the probability that a box is erased
    (painted grey; Zhong et al. 2020, arXiv:1708.04896).
    """
    steps = [POLICIES[policy]()] if policy else []
    if erasing:
        # torchvision takes a list, as its documentation says; its annotation does not.
        steps += [v2.RandomErasing(erasing, value=GREY)]  # pyright: ignore[reportArgumentType]
    return v2.Compose(steps)
