"""The learning rate over a run, as a factor of its peak."""

import math

from gptworks.config import TrainConfig


def rate_factor(train: TrainConfig, step: int, progress: float) -> float:
    """The factor at optimizer step `step` (from 0), when the share `progress` in [0, 1) of the run is done.

    Warmup is linear over `warmup_steps`. Then cosine: half a cosine from the end of warmup to the end of the run
    (Loshchilov & Hutter, 2017). wsd: constant, then linear, or as 1 - sqrt, over the last `decay_fraction` of the run
    (Hu et al., 2024; Hägele et al., 2024). Both end at `final_rate_fraction`. The horizon counts optimizer steps, never
    micro-batches.
    """
    if step < train.warmup_steps:
        return (step + 1) / train.warmup_steps
    floor = train.final_rate_fraction
    if train.schedule == "cosine":
        warmup_share = progress * train.warmup_steps / step if step else 0.0
        after_warmup = (progress - warmup_share) / (1 - warmup_share)
        return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * after_warmup))
    if train.schedule == "wsd":
        decayed = max(0.0, 1 - (1 - progress) / train.decay_fraction)  # share of the decay done
        return floor + (1 - floor) * (1 - (math.sqrt(decayed) if train.decay_shape == "1-sqrt" else decayed))
    return 1.0
