"""Batch normalisation of torch over the rows of all ranks.

    each rank                                all ranks
    forward    count and sum of its rows  -> all_reduce -> the mean
               sum of squared distances   -> all_reduce -> the variance; running averages
    backward   sums of its gradients      -> all_reduce -> the gradient through mean and variance

Each rank's gradients are those of its part of the whole loss, so that their sums are those of the
whole batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm


def is_batchnorm(module: Any) -> bool:
    """Return whether a module normalises by the statistics of a batch now."""
    return isinstance(module, _BatchNorm) and module.training


@contextmanager
def synced(model: Any, group: Any) -> Iterator[None]:
    """Make a model's batch normalisation use the rows of all ranks, each of which does the same."""
    layers = [module for module in model.modules() if is_batchnorm(module)]
    for layer in layers:
        layer.forward = partial(_forward, layer, group)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def _forward(layer: Any, group: Any, x: Any) -> Any:
    layer._check_input_dim(x)
    y, mean, variance, count = _Normalise.apply(x, layer.weight, layer.bias, layer.eps, group)
    if layer.track_running_stats:
        with torch.no_grad():
            layer.num_batches_tracked.add_(1)
            momentum = layer.momentum
            if momentum is None:  # the average of all batches
                momentum = 1.0 / float(layer.num_batches_tracked)
            layer.running_mean.lerp_(mean.to(layer.running_mean.dtype), momentum)
            unbiased = variance * (count / max(count - 1, 1))
            layer.running_var.lerp_(unbiased.to(layer.running_var.dtype), momentum)
    return y


class _Normalise(torch.autograd.Function):  # type: ignore[misc]  # it has no types
    """Normalise channels, the second axis, by the mean and variance of all ranks' rows."""

    @staticmethod
    def forward(ctx: Any, x: Any, *options: Any) -> Any:
        weight, bias, eps, group = options
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        axes = [axis for axis in range(x.dim()) if axis != 1]
        own = x.numel() // x.shape[1]
        *sums, count = group.all_reduce(torch.cat([wide.sum(axes), wide.new_tensor([own])])).split(
            [x.shape[1], 1]
        )
        if count < 2:
            raise ValueError(f"one value per channel in all ranks: {tuple(x.shape)}; expected more")
        mean = sums[0] / count
        centred = wide - _over(mean, x)
        variance = group.all_reduce((centred * centred).sum(axes)) / count
        scale = torch.rsqrt(variance + eps)
        normal = centred * _over(scale, x)
        ctx.save_for_backward(normal, scale, weight, count)
        ctx.group, ctx.dtype = group, x.dtype
        y = normal if weight is None else normal * _over(weight, x) + _over(bias, x)
        ctx.mark_non_differentiable(mean, variance)
        return y.to(x.dtype), mean, variance, int(count)

    @staticmethod
    def backward(ctx: Any, dy: Any, *_: Any) -> Any:
        normal, scale, weight, count = ctx.saved_tensors
        dy = dy.to(normal.dtype)
        axes = [axis for axis in range(dy.dim()) if axis != 1]
        own = torch.stack([dy.sum(axes), (dy * normal).sum(axes)])
        through_mean, through_variance = ctx.group.all_reduce(own) / count
        dx = dy - _over(through_mean, dy) - normal * _over(through_variance, dy)
        dx = dx * _over(scale if weight is None else scale * weight, dy)
        d_bias, d_weight = (None, None) if weight is None else own
        return dx.to(ctx.dtype), d_weight, d_bias, None, None


def _over(channels: Any, x: Any) -> Any:
    """Return a value for each channel, in the shape of the input."""
    return channels.reshape(1, -1, *[1] * (x.dim() - 2))
