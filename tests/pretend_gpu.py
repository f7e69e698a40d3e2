"""A device that is only pretended: its tensors keep their numbers on the CPU, and refuse to meet tensors that are there
as those of a GPU would. What runs on it mixes no devices; of speed, memory and kernels it says nothing.

PyTorch takes one such device into a process and never lets go of it: use it in a process of its own (test_device.py).
"""

import contextlib

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "pretend"
# The first backward pass starts a thread for every device there is; this one could not answer it.
torch.ones(1, requires_grad=True).backward()
_setup_privateuseone_for_python_backend(NAME)
DEVICE = torch.device(NAME, 0)
aten = torch.ops.aten
COPYING = {aten.copy_.default, aten._to_copy.default}
INDEXING = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}


class OnDevice(Tensor):
    """A tensor on the pretended device."""

    on_cpu: Tensor

    @staticmethod
    def __new__(cls, on_cpu: Tensor):
        layout = {"strides": on_cpu.stride(), "storage_offset": on_cpu.storage_offset(), "dtype": on_cpu.dtype}
        tensor = torch.Tensor._make_wrapper_subclass(cls, on_cpu.size(), device=DEVICE, **layout)
        tensor.on_cpu = on_cpu
        return tensor

    def untyped_storage(self):
        return self.on_cpu.untyped_storage()  # safetensors asks which tensors share theirs

    def data_ptr(self):
        return self.on_cpu.data_ptr()

    def __repr__(self, **_):
        return f"{NAME}:{self.on_cpu!r}"

    def __format__(self, how):
        return format(self.on_cpu, how)

    def tolist(self):
        return self.on_cpu.tolist()

    def __deepcopy__(self, memo):
        copy = OnDevice(self.on_cpu.detach().clone()).requires_grad_(self.requires_grad)
        memo[id(self)] = torch.nn.Parameter(copy, self.requires_grad) if isinstance(self, torch.nn.Parameter) else copy
        return memo[id(self)]

    @classmethod
    def __torch_dispatch__(cls, op, types, args=(), kwargs=None):
        return compute(op, args, kwargs or {})


class Factories(TorchDispatchMode):
    """Ops that have no tensor to say where they are: zeros, arange, randn, the way to the device."""

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        return compute(op, args, kwargs or {})


def number_it(leaf):
    """Without its number PyTorch asks a driver, which there is none of, for the current device."""
    return DEVICE if isinstance(leaf, str | torch.device) and str(leaf) == NAME else leaf


def unwrap(leaf):
    return leaf.on_cpu if isinstance(leaf, OnDevice) else leaf


class Literals(TorchFunctionMode):
    """torch.tensor is not an op: made on the CPU and sent, it becomes one."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        args, kwargs = tree_map(number_it, (args, kwargs or {}))
        if function is torch.tensor and kwargs.get("device") is not None:
            return torch.tensor(*tree_map(unwrap, args), **kwargs | {"device": None}).to(kwargs["device"])
        return function(*args, **kwargs)


def compute(op, args, kwargs):
    """Do `op` on the CPU, after the check a GPU would make, and say of the result where it would be."""
    if op is aten._fused_sdp_choice.default:
        return 0  # attention from elementary ops
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    ours = {id(t.on_cpu): t for t in tensors if isinstance(t, OnDevice)}
    to_device = isinstance(args[0], OnDevice) if op is aten.copy_.default else bool(ours)
    if kwargs.get("device") is not None:
        to_device = torch.device(kwargs["device"]).type == DEVICE.type
        kwargs = kwargs | {"device": torch.device("cpu") if to_device else kwargs["device"]}
    if op in INDEXING and isinstance(args[0], OnDevice):  # by indices that may lie on either side
        tensors = tree_leaves((args[0], args[2:]))
    strangers = [t for t in tensors if isinstance(t, Tensor) and not isinstance(t, OnDevice) and t.dim() > 0]
    if ours and strangers and op not in COPYING:
        raise RuntimeError(f"{op}: expected all tensors on the {NAME} device, but {strangers[0].shape} is on the CPU")

    def wrap(leaf):
        if not isinstance(leaf, Tensor):
            return leaf
        return ours[id(leaf)] if id(leaf) in ours else OnDevice(leaf)

    result = op(*tree_map(unwrap, args), **tree_map(unwrap, kwargs))
    return tree_map(wrap, result) if to_device else result


class Generator(torch.Generator):
    """Random numbers of the device are the CPU's."""

    def __new__(cls, device="cpu"):
        return super().__new__(cls, "cpu")


@contextlib.contextmanager
def pretend_gpu():
    """Inside, `device="pretend"` is one."""
    torch.pretend.get_amp_supported_dtype = lambda: [torch.bfloat16]  # type: ignore[attr-defined]
    torch.__future__.set_swap_module_params_on_conversion(True)  # parameters stay the same objects, so ties hold
    torch._C._set_only_lift_cpu_tensors(True)
    torch._C._InferenceMode = lambda mode: torch.no_grad()  # type: ignore[misc]  # it knows no tensors like ours
    torch.Generator = Generator  # type: ignore[misc]
    with torch.autograd.set_multithreading_enabled(False), Factories(), Literals():
        yield NAME
