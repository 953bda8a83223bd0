"""An optimizer's parameters: their names, and how the caller groups them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ringplug.backend.errors import UsageError

__all__ = ["check_groups", "check_names", "in_plan_order", "trainable"]


def check_names(
    optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, Tensor]] | None
) -> dict[int, str]:
    """Names by the parameter's id; empty if none were given.

    Raises:
        UsageError: They are no pairs, a name occurs twice, or a parameter has none.
    """
    if named_parameters is None:
        return {}
    pairs = list(named_parameters)
    if any(not isinstance(pair, tuple) or len(pair) != 2 for pair in pairs):
        raise UsageError(
            "named_parameters must be tuples (name, parameter), as model.named_parameters() "
            "gives them"
        )
    seen: set[Any] = set()
    twice = sorted({str(name) for name, _ in pairs if name in seen or seen.add(name)})  # type: ignore[func-returns-value]
    if twice:
        raise UsageError(f"named_parameters has names more than once: {', '.join(twice)}")
    names = {id(parameter): str(name) for name, parameter in pairs}
    parameters = [one for group in optimizer.param_groups for one in group["params"]]
    unnamed = sum(id(parameter) not in names for parameter in parameters)
    if unnamed:
        raise UsageError(f"named_parameters lacks {unnamed} parameters of the optimizer")
    return names


def trainable(optimizer: torch.optim.Optimizer, names: dict[int, str]) -> list[tuple[str, Tensor]]:
    """The parameters that require gradients now, with names; made ones for those without."""
    return [
        (names.get(id(parameter), f"parameter {number}.{index}"), parameter)
        for number, group in enumerate(optimizer.param_groups)
        for index, parameter in enumerate(group["params"])
        if parameter.requires_grad
    ]


def check_groups(groups: Any) -> int | list[list[Tensor]] | None:
    """`groups` as it may be given to `DistributedOptimizer`.

    Raises:
        UsageError: It is neither None, nor a number above 0, nor lists of tensors, each tensor
            in one of them.
    """
    if groups is None:
        return None
    if isinstance(groups, int) and not isinstance(groups, bool) and groups > 0:
        return groups
    if not isinstance(groups, list) or any(not isinstance(one, list | tuple) for one in groups):
        raise UsageError(
            f"groups={groups!r}: expected a number of groups above 0, or a list of lists of "
            "parameters"
        )
    seen: set[int] = set()
    for one in groups:
        for parameter in one:
            if not isinstance(parameter, Tensor):
                raise UsageError(f"groups has a {type(parameter).__name__}: expected tensors")
            if id(parameter) in seen:
                raise UsageError("groups: a parameter may be in one group only")
            seen.add(id(parameter))
    return [list(one) for one in groups]


def in_plan_order(
    named: Sequence[tuple[str, Tensor]], groups: int | list[list[Tensor]] | None
) -> list[tuple[str, Tensor]]:
    """Parameters in the order in which a plan reduces them.

    Gradients come roughly from the last layer to the first. The members of a group follow one
    another, where the member that is expected last would have been: they travel together once
    all of them are there. A number of groups cuts the list into neighbours, which are together
    as it is.
    """
    backwards = list(reversed(named))
    if not isinstance(groups, list):
        return backwards
    at = {id(parameter): place for place, (_, parameter) in enumerate(backwards)}
    turn = dict(at)
    for group in groups:
        # Parameters of other optimizers, and those without gradients, have no place here.
        members = [id(parameter) for parameter in group if id(parameter) in at]
        for member in members:
            turn[member] = max(at[other] for other in members)
    return sorted(backwards, key=lambda pair: (turn[id(pair[1])], at[id(pair[1])]))
