"""Two of the checks of equivalence, for another way into compiled steps."""

from tests.keras.ranks import equivalence

CHECKS = [
    equivalence.three_optimizers_in_every_mode,
    equivalence.accumulation_exchanges_once_per_update,
]
