"""torch's functions for lists of tensors and for loss scales, which have no public names.

One call handles all tensors of a list, on a GPU in few kernels.
"""

import torch

copy_all = torch._foreach_copy_  # pyright: ignore[reportPrivateImportUsage] (no public name)
lerp_all = torch._foreach_lerp_  # pyright: ignore[reportPrivateImportUsage] (no public name)
update_scale = torch._amp_update_scale_  # pyright: ignore[reportPrivateImportUsage] (no public name)
check_and_unscale_all = (
    torch._amp_foreach_non_finite_check_and_unscale_  # pyright: ignore[reportPrivateImportUsage] (no public name)
)
