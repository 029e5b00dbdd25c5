"""A layer's products on a GPU, with the norm before each and what comes after it, in as few launches as possible."""

from __future__ import annotations

from torch import Tensor

from ..layers import Gated, Linear
from ..norms import RMSNorm
from ..squared import Squared
from .layers import add, add_norm, gated
from .single import Single, takes
from .skinny import Alike, AsStored, Way


def normalized(
    x: Tensor, added: Tensor | None, norm: RMSNorm | None, after: RMSNorm | None, scale: Tensor | None = None
) -> Tensor:
    """Add to x [tokens, hidden_size] in place, and return its norm; None: x itself. `after`: the norm of what is
    added. `scale`: that of the sum."""
    if norm is not None:
        return add_norm(x, added, norm, after, scale)
    add(x, added, after, scale)
    return x


def product(linear: Linear, x: Tensor, activation: str) -> Tensor:
    """Return the layer; if it is the first of an MLP with its activation."""
    return gated(linear.product(x), activation) if isinstance(linear, Gated | Squared) else linear(x)


def after_norm(
    linear: Linear,
    way: Way | None,
    x: Tensor,
    added: Tensor | None,
    norm: RMSNorm | None,
    *,
    activation: str,
    after: RMSNorm | None = None,
    scale: Tensor | None = None,
) -> Tensor:
    """Do as `normalized`, and return the `product` of what it returns."""
    gate = activation if isinstance(linear, Gated | Squared) else ""
    way = _possible(linear, way, x)
    if isinstance(way, Single | AsStored) and added is None and norm is not None and takes(norm, x):
        return linear.few(x, way, activation=gate, norm=norm)
    normed = normalized(x, added, norm, after, scale)
    return product(linear, normed, activation) if way is None else linear.few(normed, way, activation=gate)


def before_residual(linear: Linear, way: Way | None, x: Tensor, residual: Tensor) -> Tensor | None:
    """Return what is to be added to the residual stream; None: it has been added."""
    way = _possible(linear, way, x)
    if way is None:
        return linear(x)
    linear.few(x, way, residual=residual)
    return None


def _possible(linear: Linear, way: Way | None, x: Tensor) -> Way | None:
    """Return how a product is computed; None: as the layer does itself."""
    if isinstance(way, AsStored):
        weight = linear.quantized
        if weight is None or linear.scale != 1 or not weight.fuses(x, is_gated=isinstance(linear, Gated)):
            return None
    return None if isinstance(way, Alike) and not linear.is_plain else way
