"""softcap_ops: soft-capped attention, `softmax(mask(cap * tanh(scale * q kT / cap))) v`, as torch.library operators.

`torch.ops.softcap_ops.*` hold the ops; the functions below are the way to call them.
"""

from . import _extension

_extension.load()

# The underscored ones are imported for what they register: one aspect of the ops each.
from . import _autocast, _autograd, _fake, _flops, _impl, _sharding, _vmap, reference  # noqa: E402, F401
from .api import explain, softcap_attention, softcap_attention_decode, softcap_attention_varlen  # noqa: E402
from .backends import available_backends  # noqa: E402
from .distributed import context_parallel_attention  # noqa: E402
from .errors import UnsupportedError  # noqa: E402
from .modules import DotProductAttention  # noqa: E402

__version__ = "0.1.0"

__all__ = [
    "DotProductAttention",
    "UnsupportedError",
    "available_backends",
    "context_parallel_attention",
    "explain",
    "reference",
    "softcap_attention",
    "softcap_attention_decode",
    "softcap_attention_varlen",
]
