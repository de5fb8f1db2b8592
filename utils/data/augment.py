"""Extra augmentations, by torchvision's v2 transforms on uint8 crops."""

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


def build(policy: str | None, erasing: float) -> Callable[[Tensor], Tensor] | None:
    """The transform of a crop, uint8 [3, h, w] to the same; None when nothing is asked for.

    ``policy`` is a key of `POLICIES`; ``erasing`` the probability of a grey box (Zhong et al. 2020,
    arXiv:1708.04896).
    """
    steps: list[Callable[[Tensor], Tensor]] = []
    if policy:
        steps.append(POLICIES[policy]())
    if erasing:
        steps.append(v2.RandomErasing(p=erasing, value=GREY))
    return v2.Compose(steps) if steps else None
