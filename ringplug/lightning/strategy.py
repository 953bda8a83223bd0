"""What RingStrategy does, in either module tree."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ringplug.backend import config, runtime
from ringplug.backend.errors import UnavailableError, UsageError
from ringplug.backend.process_set import ProcessSet
from ringplug.lightning.environment import RingEnvironmentLogic
from ringplug.lightning.keywords import check_keywords
from ringplug.lightning.learning_rates import scale_learning_rates
from ringplug.lightning.members import members_of
from ringplug.lightning.same_software import check_same_software
from ringplug.lightning.termination import Termination
from ringplug.lightning.trees import Tree
from ringplug.torch import objects
from ringplug.torch.comm_hooks import compress_hook
from ringplug.torch.compression import CompressionChoice, wire_codec
from ringplug.torch.process_group import RingProcessGroup
from ringplug.torch.rendezvous import register

__all__ = ["RingStrategyLogic"]

# In the description of an operation, which errors cut at 160 characters.
_UNEQUAL = (
    "unequal numbers of batches per rank stop here; use Lightning's sampler or cut to the "
    "smallest number"
)
_UNUSED = "Expected to have finished reduction in the prior iteration"


class RingStrategyLogic:
    """Data-parallel training on all launched processes.

    The processes come from ringrun, mpirun or srun; a plain ``python train.py`` with
    ``Trainer(devices=N)`` restarts itself on N. Ranks and sizes are the communicator's.

    Args:
        compression: What gradients are cast to on the wire: ``none``, ``fp16`` or ``bf16``, or
            that member of `ringplug.torch.Compression`.
            Sums are formed in float32. By default what ringplug's settings say, unless there is
            a `ddp_comm_hook`, which decides by itself.
        bucket_cap_mb: Size of DDP's gradient buckets in MiB.
        overlap: Whether gradients are reduced while the backward pass goes on. False reduces
            each bucket on the training thread, which can be faster where all cores compute.
        timeout: How long a rank waits for the others in one operation; a timedelta or seconds.
            By default what ringplug's settings say, 30 minutes if nothing.
        scale_lr: Multiply the learning rates, of optimizers and schedulers, by the number of
            processes.
        ddp_comm_state: State of `ddp_comm_hook`.
        ddp_comm_hook: A communication hook of DDP instead of `compression`.
        ddp_comm_wrapper: Wraps `ddp_comm_hook`.
        process_set: Train over these ranks only: a `ringplug.ProcessSet` that was given to
            ``ringplug.init(process_sets=[...])``, or the ranks of one. World size, ranks,
            samplers, torch.distributed's world and what rank 0 alone does (checkpoints, logs)
            then count within the set, so that disjoint sets train different models at the same
            time; give each directories of its own.
        **kwargs: Further arguments of Lightning's DDPStrategy and of DistributedDataParallel,
            such as ``find_unused_parameters=True`` or ``static_graph=True``.

    Raises:
        ConfigError: No such compression.
        NotInitializedError: The process set is not set up.
        TypeError: An argument that neither of them has.
        UsageError: Arguments that exclude each other, or that ask for another backend; or this
            rank is not in the process set.
    """

    _tree: Tree
    _environment_class: type[Any]
    _launcher_class: type[Any]
    _layer_sync_class: type[Any]

    # What Lightning's classes bring.
    model: Any
    accelerator: Any
    lightning_module: Any
    optimizers: Any
    lr_scheduler_configs: Any
    cluster_environment: Any
    _parallel_devices: Any
    _launcher: Any
    _layer_sync: Any
    _ddp_comm_hook: Any

    def __init__(  # noqa: PLR0913 - one per option
        self,
        compression: CompressionChoice = None,
        bucket_cap_mb: int | None = None,
        overlap: bool = True,
        timeout: timedelta | float | None = None,
        scale_lr: bool = False,
        ddp_comm_state: object | None = None,
        ddp_comm_hook: Callable[..., Any] | None = None,
        ddp_comm_wrapper: Callable[..., Any] | None = None,
        *,
        process_set: ProcessSet | Sequence[int] | None = None,
        **kwargs: Any,
    ) -> None:
        if compression is not None:
            compress_hook(compression)
        compression = wire_codec(compression)
        if compression not in (None, "none") and ddp_comm_hook is not None:
            raise UsageError("give either compression or ddp_comm_hook: both decide what is sent")
        check_keywords(
            kwargs, type(self), self._tree.module("strategies").DDPStrategy, RingStrategyLogic
        )
        for name, only in (("process_group_backend", "ring"), ("start_method", "popen")):
            if kwargs.pop(name, None) not in (None, only):
                raise UsageError(f"RingStrategy has no {name} other than {only!r}")
        if bucket_cap_mb is not None:
            kwargs["bucket_cap_mb"] = bucket_cap_mb
        if not isinstance(timeout, timedelta) and timeout is not None:
            timeout = timedelta(seconds=timeout)
        # Set here, so that Lightning does not look for one: its search starts MPI.
        environment = kwargs.pop("cluster_environment", None)
        if environment is None or process_set is not None:
            members = members_of(process_set)
            if environment is not None:
                raise UsageError("give either process_set or cluster_environment: both say ranks")
            environment = self._environment_class(members)
        if not isinstance(environment, RingEnvironmentLogic):
            raise UsageError(
                f"cluster_environment={type(environment).__name__}: RingStrategy takes ranks and "
                "sizes from the launched processes themselves; leave cluster_environment out"
            )
        kwargs["cluster_environment"] = environment
        super().__init__(  # type: ignore[call-arg]
            ddp_comm_state=ddp_comm_state,
            ddp_comm_hook=ddp_comm_hook,
            ddp_comm_wrapper=ddp_comm_wrapper,
            process_group_backend="ring",
            **kwargs,
        )
        self._compression = compression
        self._overlap = overlap
        self._ring_timeout = timeout
        self._scale_lr = scale_lr
        self._asked_nodes = 1
        self._failed = False
        self._votes_per_batch = False
        self._termination = Termination(self._any_rank)

    def __repr__(self) -> str:
        return (
            f"<RingStrategy for `import {self._tree.name}`; for the other Trainer use "
            "ringplug.lightning.strategy_class('lightning' or 'pytorch_lightning')>"
        )

    # -- ranks, devices, sizes: the communicator's

    @property
    def is_distributed(self) -> bool:
        return True

    @property
    def parallel_devices(self) -> list[torch.device] | None:
        """One device per process of this host, once Lightning has chosen an accelerator."""
        devices: list[torch.device] | None = self._parallel_devices
        if devices and devices[0].type == "cpu" and self._launched():
            return [devices[0]] * self.cluster_environment.local_size()
        return devices

    @parallel_devices.setter
    def parallel_devices(self, devices: list[torch.device] | None) -> None:
        self._parallel_devices = devices

    @property
    def root_device(self) -> torch.device:
        devices = self._parallel_devices or [torch.device("cpu")]
        if devices[0].type == "cpu":
            return devices[0]
        local_rank = self.cluster_environment.local_rank()
        # One visible device per process is device 0 in each of them.
        return devices[local_rank if len(devices) > 1 else 0]

    @property
    def num_processes(self) -> int:
        if self._launched():
            return int(self.cluster_environment.local_size())
        return len(self._parallel_devices or ())

    @property
    def num_nodes(self) -> int:
        return int(self.cluster_environment.num_nodes()) if self._launched() else self._asked_nodes

    @num_nodes.setter
    def num_nodes(self, num_nodes: int) -> None:
        self._asked_nodes = num_nodes

    @property
    def world_size(self) -> int:
        if self._launched():
            return int(self.cluster_environment.world_size())
        return max(1, self.num_processes * self._asked_nodes)

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.world_size, "rank": self.cluster_environment.global_rank()}

    def set_world_ranks(self) -> None:
        if self._launched() and self._parallel_devices:
            self.cluster_environment.validate_settings(
                len(self._parallel_devices), self._asked_nodes
            )
        from lightning_utilities.core.rank_zero import rank_zero_only

        rank_zero_only.rank = self.cluster_environment.global_rank()

    def _launched(self) -> bool:
        return bool(self.cluster_environment.creates_processes_externally)

    # -- start

    def _configure_launcher(self) -> None:
        self._launcher = self._launcher_class(
            self.cluster_environment, self.num_processes, self.num_nodes
        )

    def setup_distributed(self) -> None:
        """Join the world and make the process group, once for all runs of the process."""
        self._tree.fabric_module("utilities.seed").reset_seed()
        self._failed = False
        if self.root_device.type != "cpu":
            raise UnavailableError(
                f"RingStrategy with {self.root_device}: no transport moves "
                f"{self.root_device.type} tensors; candidates: nccl (not part of this version), "
                "shared_memory, ring, hierarchical (CPU tensors only). Use "
                "Trainer(accelerator='cpu')"
            )
        rt = runtime.init()
        members = self.cluster_environment.members
        # Anew: the set may be gone, or the runtime another one.
        number = 0 if members is None else rt.groups.number_of(members)
        self.set_world_ranks()
        world = rt.world
        config.export_ranks(world.rank, world.size, world.local_rank, world.local_size)
        if dist.is_initialized():
            if dist.get_backend() != "ring":
                raise UsageError(
                    f"torch.distributed runs on {dist.get_backend()} already; RingStrategy "
                    "would train with it. Destroy that group first, or initialise 'ring'"
                )
            trains = rt.groups.find(number).ranks
            if self._group().members != trains:
                raise UsageError(
                    f"torch.distributed's world is ranks {list(self._group().members)}, while "
                    f"RingStrategy is to train over ranks {list(trains)}: call torch.distributed."
                    "destroy_process_group() before training with others"
                )
            exists = self._group().timeout
            if self._ring_timeout is not None and self._ring_timeout.total_seconds() != exists:
                raise UsageError(
                    f"the process group exists already, with a timeout of {exists:g} s: call "
                    "torch.distributed.destroy_process_group() before training with another one"
                )
        else:
            check_same_software(self._tree.name, number)
            register()
            seconds = rt.config.timeout
            if self._ring_timeout is not None:
                seconds = self._ring_timeout.total_seconds()
            dist.init_process_group(
                "ring",
                init_method=f"ring://?process_set={number}",
                timeout=timedelta(seconds=seconds),
            )
        self._group().overlap = self._overlap

    def setup(self, trainer: Any) -> None:
        if self._layer_sync is not None and self.root_device.type == "cpu":
            plain = self._tree.module("plugins.layer_sync").TorchSyncBatchNorm
            if type(self._layer_sync) is plain:
                self._layer_sync = self._layer_sync_class()
        super().setup(trainer)  # type: ignore[misc]
        exception = self._tree.module("utilities.exceptions").SIGTERMException
        self._votes_per_batch = self.world_size > 1 and not self._termination.watch(
            trainer, exception
        )

    def _register_ddp_hooks(self) -> None:
        compression = self._compression
        if compression is None and self._ddp_comm_hook is None:
            compression = runtime.current().config.compression
        if compression not in (None, "none"):
            self.model.register_comm_hook(self._group(), compress_hook(compression))
        elif self._ddp_comm_hook is not None:
            # Lightning registers hooks for CUDA only; they work on this backend everywhere.
            self._tree.module("overrides.distributed")._register_ddp_comm_hook(
                model=self.model,
                ddp_comm_state=self._ddp_comm_state,  # type: ignore[attr-defined]
                ddp_comm_hook=self._ddp_comm_hook,
                ddp_comm_wrapper=self._ddp_comm_wrapper,  # type: ignore[attr-defined]
            )

    def setup_optimizers(self, trainer: Any) -> None:
        super().setup_optimizers(trainer)  # type: ignore[misc]
        if not self._scale_lr:
            return
        lines = scale_learning_rates(
            self.optimizers,
            [scheduler.scheduler for scheduler in self.lr_scheduler_configs],
            self.world_size,
        )
        show = self._tree.module("utilities.rank_zero").rank_zero_info
        for line in lines:
            show(f"learning rates times {self.world_size} processes: {line}")

    # -- in step

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)  # type: ignore[misc]
        if self._votes_per_batch:
            self._termination.check()

    def _any_rank(self, flag: bool, place: str) -> bool:
        if self._alone():
            return flag
        return objects.count_votes(self._group(), flag, "start", f"of {place} ({_UNEQUAL})") > 0

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        if not self._alone():
            name = args[0] if args else kwargs.get("name")
            objects.barrier(self._group(), str(name or ""))

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        if self._alone():
            return obj
        return objects.broadcast_object(self._group(), obj, src)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        if self._alone():
            return bool(decision)
        what = f"where {'all ranks' if all else 'any rank'} must agree"
        votes = objects.count_votes(self._group(), bool(decision), "decision", what)
        return votes == self.world_size if all else votes > 0

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        if self._ended():
            return tensor
        return super().reduce(tensor, group, reduce_op)  # type: ignore[misc]

    def _group(self) -> RingProcessGroup:
        group = dist.group.WORLD
        if not isinstance(group, RingProcessGroup):
            raise UsageError("torch.distributed's group was replaced during training")
        return group

    def _alone(self) -> bool:
        """Whether there is nobody to wait for: before the group exists, or after a failure."""
        return self._ended() or not dist.is_initialized()

    def _ended(self) -> bool:
        """Whether this rank is ending with an exception.

        The others are then elsewhere; what callbacks do about the exception (such as saving a
        checkpoint) must not wait for them.
        """
        if self._failed:
            return True
        module = self.lightning_module
        trainer = None if module is None else module._trainer
        return trainer is not None and trainer.state.status == "interrupted"

    # -- end

    def on_exception(self, exception: BaseException) -> None:
        self._failed = True
        if exception.args and _UNUSED in str(exception):
            hint = (
                "Parameters of the LightningModule were not used for the loss that training_step "
                "returned. If that is intended, use strategy='ring_find_unused_parameters_true' "
                "or RingStrategy(find_unused_parameters=True)."
            )
            exception.args = (f"{hint}\n{exception.args[0]}", *exception.args[1:])

    def teardown(self) -> None:
        self._termination.release()
        super().teardown()  # type: ignore[misc]

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Add the names ``ring``, ``ring_find_unused_parameters_true`` and so on."""
        for name, arguments in (
            ("ring", {}),
            ("ring_find_unused_parameters_true", {"find_unused_parameters": True}),
            ("ring_find_unused_parameters_false", {"find_unused_parameters": False}),
            ("ring_static_graph", {"static_graph": True}),
        ):
            if name not in strategy_registry:
                strategy_registry.register(
                    name, cls, description="ringplug: data-parallel processes", **arguments
                )
