"""A training step of a torch module. The functions are those that `_api/training.py` requires of a
framework.

A rank's gradients are one flat array, which the ranks sum in place:

    after backward   loss | which parameters it depends on | gradient | gradient | ...
                       one array of the group's, with a copy of what torch has computed
    sum              one all_reduce of that array, in place, without a copy
    take             each parameter's gradient is its part of the array, until the next step

If somebody holds a gradient for longer than that, the next step uses another array.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import lru_cache, reduce
from typing import Any, NamedTuple

import numpy as np
import torch

from weft.adapters import torch_arrays
from weft.adapters.torch_batchnorm import is_batchnorm, synced
from weft.errors import Disagreement, InvalidType, InvalidValue, PeerLost

#: elements to whose multiple the first gradient is aligned: a cache line of float32
_LINE = 16
#: the most arrays for one optimizer, each for another set of parameters
_SETS = 4


def validate(model: Any, optimizer: Any, options: Any) -> None:
    """Raise InvalidValue for an optimizer of other parameters than the model's."""
    own = set(map(id, model.parameters()))
    if not any(id(p) in own for group in optimizer.param_groups for p in group["params"]):
        raise InvalidValue(
            f"the {type(optimizer).__name__} has none of the {type(model).__name__}'s parameters, "
            "so no step would change it; make it with model.parameters()"
        )


class Parts:
    """The modules, parameters and buffers of a model, each once."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.modules: list[Any] = []
        self.parameters: list[Any] = []
        self.buffers: list[Any] = []
        #: what holds them, and what each held
        self._held: list[tuple[Any, list[int]]] = []
        seen: set[int] = set()
        waiting = [model]
        while waiting:
            module = waiting.pop()
            if id(module) in seen:
                continue
            seen.add(id(module))
            self.modules.append(module)
            for holder in (module._parameters, module._buffers, module._modules):
                self._held.append((holder, [*map(id, holder.values())]))
            own = (self.parameters, module._parameters), (self.buffers, module._buffers)
            for found, tensors in own:
                for tensor in tensors.values():
                    if tensor is not None and id(tensor) not in seen:
                        seen.add(id(tensor))
                        found.append(tensor)
            waiting.extend(child for child in module._modules.values() if child is not None)

    def is_still(self, model: Any) -> bool:
        """Return whether they are all that a model has now."""
        if model is not self.model:
            return False
        for holder, held in self._held:  # noqa: SIM110  in a third of the time of all()
            if [*map(id, holder.values())] != held:
                return False
        return True


def parts_of(model: Any, optimizer: Any) -> Parts:
    """Return a model's parts. They are kept while the optimizer lives: each step asks several
    times, and to see that nothing has changed takes less than to walk through a model."""
    parts = _parts.get(optimizer)
    if parts is None or not parts.is_still(model):
        parts = _parts[optimizer] = Parts(model)
    return parts


#: weak, since they end with the optimizer
_parts: weakref.WeakKeyDictionary[Any, Parts] = weakref.WeakKeyDictionary()


def parameters(model: Any) -> list[Any]:
    """Return the model's parameters and buffers, also those that `state_dict` leaves out."""
    parts = Parts(model)
    return [*parts.parameters, *parts.buffers]


def values(model: Any, optimizer: Any) -> tuple[list[Any], Any, Any]:
    """Return their values: parameters, buffers, and what the optimizer has for each parameter."""
    parts, states = parts_of(model, optimizer), [*getattr(optimizer, "state", {}).values()]
    held = [*parts.parameters, *parts.buffers]
    for state in states:
        held += state.values()
    seen = _seen.get(optimizer)
    if seen is None or not seen.are(held):
        seen = _seen[optimizer] = _Values(held)
    return seen.arrays, seen.copies(), (seen.others, [list(state) for state in states])


class _Values:
    """Values of a model and its optimizer, told apart: to do that takes longer than to see that
    they are the same objects, with the same memory, as before."""

    def __init__(self, held: Sequence[Any]) -> None:
        self._held = held
        self._tensors = [value for value in held if isinstance(value, torch.Tensor)]
        self._places = [tensor.data_ptr() for tensor in self._tensors if not tensor.is_sparse]
        self.arrays: list[Any] = []
        self.others: list[Any] = []
        #: those on devices, flat, by device and dtype
        self._groups: dict[Any, list[Any]] = {}
        for value in held:
            if isinstance(value, torch.Tensor) and value.is_cuda and not value.is_sparse:
                group = self._groups.setdefault((value.device, value.dtype), [])
                group.append(value.detach().reshape(-1))
            elif _is_plain(value):
                self.arrays.append(value.detach().numpy())
            else:
                self.others.append(value)

    def are(self, held: Sequence[Any]) -> bool:
        """Return whether these are the same objects, with the same memory."""
        if [*map(id, held)] != [*map(id, self._held)]:
            return False
        return self._places == [one.data_ptr() for one in self._tensors if not one.is_sparse]

    def copies(self) -> Copies | None:
        """Return copies of those on devices; None if there are none."""
        return Copies(self._groups) if self._groups else None


#: weak, since they end with the optimizer
_seen: weakref.WeakKeyDictionary[Any, _Values] = weakref.WeakKeyDictionary()


class Copies:
    """Copies of tensors on devices, joined by device and dtype: equal if all their bits are."""

    def __init__(self, groups: Mapping[Any, Sequence[Any]]) -> None:
        self._joined = {
            key: torch_arrays.as_bytes(torch.cat([*group])) for key, group in groups.items()
        }

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Copies) or self._joined.keys() != other._joined.keys():
            return False
        return all(
            mine.shape == other._joined[key].shape and torch.equal(mine, other._joined[key])
            for key, mine in self._joined.items()
        )

    __hash__ = None  # type: ignore[assignment]


def _is_plain(value: Any) -> bool:
    """Return whether a value is a tensor whose memory has all its values, and NumPy its dtype."""
    plain = isinstance(value, torch.Tensor) and value.dtype in _IN_NUMPY and value.is_cpu
    return plain and value.layout is torch.strided and value.is_contiguous() and not value.is_conj()


_IN_NUMPY = (torch.float32, torch.float64, torch.float16, torch.int64)


class Settings(NamedTuple):
    """Describe what a program changes of a model and its optimizer, besides values."""

    training: list[bool]
    trainable: list[bool]
    #: of each group of parameters: the learning rate, and so on
    options: list[dict[str, Any]]
    #: whether batch normalisation uses the statistics of all ranks' rows
    sync_batchnorm: bool
    #: the largest norm of the gradients
    clip: float | None


def settings(model: Any, optimizer: Any, options: Any, *, alone: bool) -> Settings:
    """Return the settings; `alone` without what only workers need. Raises InvalidValue for hooks,
    which workers would not call."""
    hooks = "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"
    if any(getattr(optimizer, name, None) for name in hooks):
        raise InvalidValue(
            f"the {type(optimizer).__name__} has hooks, which torch does not send along, so they "
            "would be called in the driver only; override step() in a class of your own instead"
        )
    if alone:
        return Settings([], [], [], options.sync_batchnorm, options.clip)
    parts = parts_of(model, optimizer)
    return Settings(
        [module.training for module in parts.modules],
        [parameter.requires_grad for parameter in parts.parameters],
        [
            {key: value for key, value in group.items() if key != "params"}
            for group in optimizer.param_groups
        ],
        options.sync_batchnorm,
        options.clip,
    )


def constants(model: Any) -> list[Any]:
    """Return the parameters: without gradients a loss changes only buffers."""
    return list(model.parameters())


def evaluate(
    loss: Callable[..., Any], model: Any, batch: Sequence[Any], named: dict[str, Any]
) -> Any:
    """Return the loss in the model's evaluation mode, without what is random or looks at the batch.
    Raises InvalidType unless it is one number."""
    with torch.no_grad():
        return _validate_loss(loss(model.eval(), *batch, **named)).detach()


def batchnorm(model: Any) -> str | None:
    """Return the name of a layer that normalises by the batch's own statistics; None: none does."""
    for name, module in model.named_modules():
        if is_batchnorm(module):
            return f"{type(module).__name__} {name}".strip()
    return None


def _apply_settings(model: Any, optimizer: Any, settings: Settings) -> None:
    parts = parts_of(model, optimizer)
    for module, training in zip(parts.modules, settings.training, strict=True):
        module.training = training
    for parameter, trainable in zip(parts.parameters, settings.trainable, strict=True):
        if parameter.requires_grad is not trainable:
            parameter.requires_grad_(trainable)
    for group, options in zip(optimizer.param_groups, settings.options, strict=True):
        group.update(options)


def step(member: Any, numbers: Sequence[int], settings: Settings, parts: Sequence[Any]) -> float:
    """Compute the gradients of a rank's rows, given in parts, average them over the ranks, and
    update the rank's model (a remote function).

    The loss is weighted before its gradients are computed, so their plain sum is their mean.
    """
    loss, model, optimizer, *scalers = (member.registered[number] for number in numbers)
    scaler = scalers[0] if scalers else None
    try:
        if member.rank > 0:
            _apply_settings(model, optimizer, settings)
        optimizer.zero_grad(set_to_none=True)
        with synced(model, member.group) if settings.sync_batchnorm else nullcontext():
            losses = [_backward(loss, model, part, scaler) for part in parts]
        own: Any = _Sum(losses)
        parameters = [
            p for group in optimizer.param_groups for p in group["params"] if p.requires_grad
        ]
        gradients = None
        if member.group.size > 1:
            gradients = gradients_for(optimizer, parameters, member.group)
            gradients.put(own, parameters)
    except (Disagreement, PeerLost):  # the others know
        raise
    except Exception as error:
        member.group.refuse("train_step", error)
        raise
    if gradients is not None:
        gradients.sum_in_place(member.group)
        own = gradients.take(parameters)
        fraction = sum(fraction for _, _, fraction in parts)
        _average_buffers(parts_of(model, optimizer).buffers, member.group, fraction)
    _update(optimizer, scaler, parameters, settings.clip)
    return float(own)


def _backward(loss: Callable[..., Any], model: Any, part: Any, scaler: Any) -> Any:
    """Add the gradients of a part of the rows to the parameters'. Return the part of the loss."""
    batch, named, fraction = part
    if not fraction:
        return 0.0
    computed = _validate_loss(loss(model, *batch, **named))
    weighted = computed if fraction == 1 else computed * fraction
    (weighted if scaler is None else scaler.scale(weighted)).backward()
    return weighted.detach()


class _Sum:
    """A sum of losses, which is brought to the host while the device goes on computing: to wait for
    it costs the lead that the processor has over the device only where that is needed."""

    def __init__(self, losses: Sequence[Any]) -> None:
        total = sum(losses)
        self._total, self._done = total, None
        if isinstance(total, torch.Tensor) and total.is_cuda:
            self._total = torch.empty(total.shape, dtype=total.dtype, pin_memory=True)
            self._total.copy_(total, non_blocking=True)
            self._done = torch.cuda.Event(blocking=True)
            self._done.record(torch.cuda.current_stream(total.device))

    def __float__(self) -> float:
        if self._done is not None:
            torch_arrays.wait_for(self._done)
        return float(self._total.real if isinstance(self._total, torch.Tensor) else self._total)


def _average_buffers(buffers: Sequence[Any], group: Any, fraction: float) -> None:
    """Average means over rows, such as those of batch normalisation, weighted by rows, in double
    precision: buffers that are equal on all ranks stay as they are."""
    # those of a dtype joined, as what is done for each of many takes longer than to copy them
    alike: dict[Any, list[Any]] = {}
    for buffer in buffers:
        if buffer.numel():
            alike.setdefault(buffer.dtype, []).append(buffer)
    if not alike:
        return
    wide = reduce(torch.promote_types, alike, torch.float64)
    joined = [torch.cat([b.reshape(-1) for b in some]).to(wide) for some in alike.values()]
    whole = torch.cat(joined)
    # zeros, as the statistics of no rows are often NaN
    averaged = group.all_reduce(whole.mul_(fraction) if fraction else whole.zero_())
    for some, values in zip(
        alike.values(), averaged.split([j.numel() for j in joined]), strict=True
    ):
        rounded = values if some[0].is_floating_point() or wide.is_complex else values.round()
        pieces = rounded.to(some[0].dtype).split([b.numel() for b in some])
        torch._foreach_copy_(some, [p.view(b.shape) for p, b in zip(pieces, some, strict=True)])


def _update(optimizer: Any, scaler: Any, parameters: Sequence[Any], clip: float | None) -> None:
    """Make the optimizer's step, which is the same in all ranks."""
    if clip is not None:
        if scaler is not None:
            scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(parameters, clip)
    if scaler is None:
        optimizer.step()
    else:
        scaler.step(optimizer)
        scaler.update()


def _validate_loss(computed: Any) -> Any:
    """Return what a loss returned. Raises InvalidType unless it is a tensor of one number."""
    if not isinstance(computed, torch.Tensor) or computed.numel() != 1:
        shape = f" of shape {tuple(computed.shape)}" if isinstance(computed, torch.Tensor) else ""
        raise InvalidType(
            f"the loss returned a {type(computed).__name__}{shape}; expected a tensor of one "
            "number, the mean over the rows"
        )
    return computed


# gradients


#: by optimizer, then by size of the group and form of the parameters; weak, since they end with the
#: optimizer
_gradients: weakref.WeakKeyDictionary[Any, dict[tuple[Any, ...], Gradients]]
_gradients = weakref.WeakKeyDictionary()


def gradients_for(
    optimizer: Any, parameters: Sequence[Any], group: Any
) -> Gradients | GradientsOnDevice:
    """Return the array for the gradients of an optimizer's parameters: at each step the same one,
    unless somebody still holds a gradient in it; on a device a fresh one, which torch has ready."""
    devices = {p.device for p in parameters}
    if len(devices) > 1:
        raise InvalidValue(
            f"parameters on {' and '.join(sorted(map(str, devices)))}: a step sums gradients on "
            "one device; move the model to one"
        )
    if any(device.type == "cuda" for device in devices):
        return GradientsOnDevice(parameters)
    key = (group.size, *((p.shape, p.dtype, p.stride()) for p in parameters))
    gradients = _gradients.setdefault(optimizer, {})
    if key not in gradients or gradients[key].in_use:
        if len(gradients) >= _SETS:
            gradients.clear()
        gradients[key] = Gradients(parameters, group)
    return gradients[key]


class Gradients:
    """The loss, and its gradients for some parameters, in one array."""

    def __init__(self, parameters: Sequence[Any], group: Any) -> None:
        # half precision is summed in float32
        self._dtype = reduce(torch.promote_types, (p.dtype for p in parameters), torch.float32)
        first = -(-(1 + len(parameters)) // _LINE) * _LINE
        self._forms, size = _forms(tuple((p.shape, p.stride()) for p in parameters), first)
        self._flat = group.allocate(size, torch.empty(0, dtype=self._dtype).numpy().dtype)
        self._parts: list[Any] = []
        #: a weak reference to the array under all gradients handed out: alive while one of them is
        self._given: Callable[[], Any] = lambda: None

    @property
    def in_use(self) -> bool:
        """Return whether somebody still holds a gradient of the last step."""
        return self._given() is not None

    def put(self, loss: Any, parameters: Sequence[Any]) -> None:
        """Copy a rank's own loss and gradients in. Raises InvalidType for sparse gradients."""
        array = self._flat[:]  # alive as long as any tensor over it
        whole = torch.from_numpy(array)
        self._given = weakref.ref(array)
        self._parts = [whole.as_strided(*form) for form in self._forms]
        self._flat[0] = float(loss)
        for place, (one, part) in enumerate(zip(parameters, self._parts, strict=True), 1):
            self._flat[place] = one.grad is not None
            if one.grad is None:
                part.zero_()
                continue
            part.copy_(_dense_gradient(one))

    def sum_in_place(self, group: Any) -> None:
        """Replace loss and gradients by their sums over all ranks."""
        group.all_reduce(self._flat, out=self._flat)

    def take(self, parameters: Sequence[Any]) -> float:
        """Set the parameters' gradients, and return the loss. A parameter on which no rank's loss
        depends gets none."""
        parts, self._parts = self._parts, []
        for place, (one, part) in enumerate(zip(parameters, parts, strict=True), 1):
            if self._flat[place]:
                one.grad = part if self._dtype is one.dtype else part.to(one.dtype)
        return float(self._flat[0].real)  # complex parameters make the array complex


@lru_cache(maxsize=64)
def _forms(
    parameters: tuple[tuple[Any, Any], ...], first: int = 0
) -> tuple[list[tuple[Any, Any, int]], int]:
    """Return shape, strides and start of each gradient in a flat array, given shape and strides of
    each parameter: laid out as torch would, on which some optimizers rely. And the array's size."""
    forms, start = [], first
    for shape, stride in parameters:
        like = torch.empty_like(torch.empty_strided(shape, stride, device="meta"))
        forms.append((shape, like.stride(), start))
        start += like.numel()
    return forms, max(start, 1)


class GradientsOnDevice:
    """The gradients for some parameters on a device, in one tensor there, and the loss beside it:
    what the host has to know is on the host."""

    def __init__(self, parameters: Sequence[Any]) -> None:
        # half precision is summed in float32
        dtype = reduce(torch.promote_types, (p.dtype for p in parameters), torch.float32)
        forms, size = _forms(tuple((p.shape, p.stride()) for p in parameters))
        self._flat = torch.empty(size, dtype=dtype, device=parameters[0].device)
        self._parts = [self._flat.as_strided(*form) for form in forms]
        #: the loss, and which parameters it depends on
        self._head = np.zeros(1 + len(parameters))

    def put(self, loss: Any, parameters: Sequence[Any]) -> None:
        """Copy a rank's own loss and gradients in. Raises InvalidType for sparse gradients."""
        pairs = list(zip(parameters, self._parts, strict=True))
        given = [(_dense_gradient(p), part) for p, part in pairs if p.grad is not None]
        absent = [part for p, part in pairs if p.grad is None]
        if given:
            torch._foreach_copy_([part for _, part in given], [grad for grad, _ in given])
        if absent:
            torch._foreach_zero_(absent)
        self._head[1:] = [p.grad is not None for p in parameters]
        self._head[0] = float(loss)

    def sum_in_place(self, group: Any) -> None:
        """Replace loss and gradients by their sums over all ranks."""
        group.all_reduce(self._head, out=self._head)
        group.all_reduce(self._flat, out=self._flat)

    def take(self, parameters: Sequence[Any]) -> float:
        """Set the parameters' gradients, and return the loss. A parameter on which no rank's loss
        depends gets none."""
        for one, part, used in zip(parameters, self._parts, self._head[1:], strict=True):
            if used:
                one.grad = part if part.dtype is one.dtype else part.to(one.dtype)
        return float(self._head[0])


def _dense_gradient(parameter: Any) -> Any:
    """Return a parameter's gradient. Raises InvalidType if it is sparse."""
    if parameter.grad.layout is not torch.strided:
        raise InvalidType(
            f"a parameter of shape {tuple(parameter.shape)} has a gradient of layout "
            f"{parameter.grad.layout}; only dense ones can be added up: an embedding has them "
            "with sparse=False"
        )
    return parameter.grad.detach()
