"""A DistributedDataParallel communication hook that keeps non-finite gradients out of the mean."""

# No postponed annotations here: DistributedDataParallel reads those of the hook, and refuses strings.
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket


def finite_mean_hook(
    process_group: dist.ProcessGroup | None, bucket: GradBucket
) -> torch.futures.Future[Tensor]:
    """Mean of the replicas' gradients, leaving out those that are not finite.

    DDP's own mean spreads one replica's NaN to all of them, and with it the whole run. With this hook a
    replica whose gradient bucket holds a NaN or an infinity contributes nothing to that bucket and
    receives the mean of the others. If no replica has a finite bucket the result is NaN, as without
    the hook, so that a gradient scaler or a check of yours still sees it. No host sync; one extra
    one-element reduction per bucket::

        ddp = DistributedDataParallel(model)
        ddp.register_comm_hook(None, hdet.finite_mean_hook)      # None: the default process group
    """
    group = process_group if process_group is not None else dist.group.WORLD
    gradient = bucket.buffer()
    is_finite = torch.isfinite(gradient).all()
    # A product would keep NaN (0 * NaN is NaN): select instead.
    gradient.copy_(torch.where(is_finite, gradient, torch.zeros_like(gradient)))
    size = dist.get_world_size(group)
    gradient.div_(size)  # before the sum, so that half precisions do not overflow
    num_finite = is_finite.to(torch.float32).reshape(1)
    count_work = dist.all_reduce(num_finite, group=group, async_op=True)
    work = dist.all_reduce(gradient, group=group, async_op=True)
    assert count_work is not None and work is not None

    def divide(future: torch.futures.Future[list[Tensor]]) -> Tensor:
        count_work.wait()
        return future.value()[0].mul_(size / num_finite)

    return work.get_future().then(divide)
