"""Users' own reductions, compressors and transports: the documentation's examples, and more."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.launching import run_ranks

PAGE = Path(__file__).resolve().parents[2] / "docs" / "extending.md"
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
SHOWN = ["[ 2. -4.]", "0.15625", "4000000"]


@pytest.mark.parametrize(("example", "shown"), list(zip(EXAMPLES, SHOWN, strict=True)))
def test_example(example, shown):
    assert run_ranks(example, 2).stdout.count(shown) == 2


USED = (
    EXAMPLES[1].partition("ringplug.init")[0]
    + """
used = []

class Counted(Float8):
    def encode(self, source, payload):
        used.append(source.size)
        super().encode(source, payload)

rt = ringplug.init(compression=Counted())
from ringplug.backend.fusion import TensorSpec
x = np.ones(100, np.float32)
rt.plan([TensorSpec("x", (100,), x.dtype)], name="p").run([x], [x])
assert sum(used) == 100 and (x == 1).all()
assert rt.named._lane.transport.name == "shared_memory"

# Ranks with different codecs hear of each other; one without the needed methods is refused.
class Other(Float8):
    name = f"of rank {ringplug.rank()}"

try:
    ringplug.allreduce(x, compression=Other(), name="other")
except ringplug.MismatchError as error:
    assert "Mismatched compression" in str(error)
else:
    raise AssertionError
ringplug.shutdown()
for wrong in ({"compression": object()}, {"transport": 3}):
    try:
        ringplug.init(**wrong)
    except ringplug.ConfigError as error:
        assert "expected one of" in str(error)
    else:
        raise AssertionError
print("fine")
"""
)


def test_an_own_compressor_is_used():
    assert run_ranks(USED, 2).stdout.count("fine") == 2
