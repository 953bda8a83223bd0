"""Some of the other modules' checks, for another way into compiled steps."""

from tests.keras.ranks import batch_norm, equivalence

CHECKS = [
    equivalence.three_optimizers_in_every_mode,
    equivalence.accumulation_exchanges_once_per_update,
    batch_norm.trains_like_one_process,
]
