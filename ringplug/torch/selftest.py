"""A check, once per process, that this PyTorch still drives process groups written in Python.

The interface is used by PyTorch itself and by others, but is not documented: a version that
changed it must say so at the start, not average nothing during training.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from ringplug.backend.errors import RingplugError, UnavailableError
from ringplug.torch.objects import count_votes

__all__ = ["check_once"]

_checked = False


def check_once(group: Any) -> None:
    """Reduce one tensor and take one DDP step with a tiny model, on all ranks of the group.

    Raises:
        UnavailableError: The results are wrong, or PyTorch refused; says what happened.
    """
    global _checked  # noqa: PLW0603 - the answer holds for the process
    # A rank may have been in an earlier group of which others were not.
    if not count_votes(group, not _checked, "self-test", "of a new process group"):
        return
    try:
        wrong = _check(group)
    except RingplugError:
        raise
    except (RuntimeError, TypeError, AttributeError, NotImplementedError) as error:
        raise _changed(f"{type(error).__name__}: {error}") from error
    if wrong:
        raise _changed(wrong)
    _checked = True


def _changed(what: str) -> UnavailableError:
    return UnavailableError(
        f"PyTorch {torch.__version__} does not drive the process group `ring` as versions "
        f"2.6 to 2.13 do, so training would be wrong: {what}. Install a version that ringplug "
        "was tested with, or a newer ringplug"
    )


def _check(group: Any) -> str:
    size, rank = group.size(), group.rank()
    mean = (size + 1) / 2
    tensor = torch.full((3,), float(rank + 1))
    group.allreduce([tensor]).wait()
    if tensor.tolist() != [mean * size] * 3:
        return f"a sum over {size} ranks gave {tensor.tolist()}"
    # Seeds of the user are not touched: the weights are constants.
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.constant_(model.weight, float(rank))
    wrapped = DistributedDataParallel(model, process_group=group)
    if model.weight.item() != 0.0:
        return f"rank {rank} did not get rank 0's weight but {model.weight.item()}"
    with torch.inference_mode(False), torch.enable_grad():
        wrapped(torch.full((1, 1), float(rank + 1))).sum().backward()
    gradient = model.weight.grad
    if gradient is None or gradient.item() != mean:
        return f"a mean gradient of {mean} became {gradient}"
    return ""
